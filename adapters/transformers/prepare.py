"""Convert a Hugging Face model for the trainer: FP8 linears, and in exact mode the rollout's other ops too."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from jetrl_patch import active
from jetrl_patch.adapters.transformers.attention import NAME
from jetrl_patch.adapters.transformers.experts import check_registered, use_fp8_experts
from jetrl_patch.adapters.transformers.fused import fuse, fuse_exact
from jetrl_patch.adapters.transformers.head import check_head, widen_head
from jetrl_patch.adapters.transformers.residual import add_in_norms
from jetrl_patch.adapters.transformers.rotary import rotate_together
from jetrl_patch.config import Config
from jetrl_patch.errors import ModelError, NotPatchedError, explain
from jetrl_patch.exact import dispatch, modules
from jetrl_patch.exact.choice import choose_attention
from jetrl_patch.exact.coverage import check_family
from jetrl_patch.family import DROPOUTS
from jetrl_patch.fp8.backends import choose_backend
from jetrl_patch.fp8.convert import split_layers, swap_linears
from jetrl_patch.fp8.layers import cut_words, is_row_parallel
from jetrl_patch.fp8.transformer_engine import is_te_linear

logger = logging.getLogger(__name__)


def prepare_model(
    model: nn.Module,
    config: Config,
    rollout_tp: int = 1,
    device_type: str = "cpu",
    rollout_ep: int = 1,
) -> list[str]:
    """Convert a causal language model in place, before it is wrapped by FSDP or ZeRO.

    All checks run before any change. Parameters keep their names, dtypes and identity; meta tensors stay meta.

    Args:
        model: a Hugging Face model with an ``lm_head``.
        rollout_tp: tensor-parallel size of the rollout, whose order of partial sums the trainer follows.
        device_type: device the model will run on; decides the backend.
        rollout_ep: expert-parallel size of the rollout, which decides the same for experts.

    Returns:
        Names of the quantized layers: those converted here or, if only the rollout is quantized, those that the rollout
        quantizes. Empty in BF16.

    Raises:
        ModelError: the model cannot be converted.
        ConfigError: this machine lacks the backend or the exact ops.
        NotPatchedError: the exact attention is not registered with transformers.
    """
    if config.fp32_head:
        check_head(model)
    names, cut = split_layers(model, config, rollout_tp, rollout_ep) if config.quantized_rollout else ([], [])
    if config.fp8_train:
        check_registered(model, device_type)
    if cut:
        note_cut(cut, rollout_tp)
    if not config.fp8_train:
        if config.fp32_head:
            widen_head(model, config)
        return names
    if config.exact:
        kinds = _check_exact(model)
        dispatch.configure(config.backend, device_type)
        choose_attention(config.exact_attention, *_heads(model.config), torch.device(device_type))
    backend = choose_backend(config.backend, device_type)
    swap_linears(model, config.exclude, config.scale_format, backend, rollout_tp, names, rollout_ep, config.exact)
    use_fp8_experts(model)
    if config.fp32_head:
        widen_head(model, config)  # before the swaps below, which then leave it alone
    if config.exact:
        _make_exact(model, kinds, rollout_tp)
        fuse_exact(model, backend, device_type)
        drop_nothing(model)
    else:
        fuse(model, backend, device_type)
    add_in_norms(model, backend, device_type)
    rotate_together(model, backend, device_type)
    return names


def _heads(config: Any) -> tuple[tuple[int, int], int]:
    """Heads of queries, and of keys and values, and their width."""
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return (heads, getattr(config, "num_key_value_heads", None) or heads), width


def note_cut(layers: list[str], tp: int) -> None:
    """Log and record the layers that ``on_cut="bf16"`` leaves in BF16. Says it once per process."""
    if set(layers) - set(active.notes().cut):
        logger.warning("jetrl_patch: on_cut='bf16': %s", cut_words(layers, tp))
    active.register_cut(layers)


def drop_nothing(model: Any) -> None:
    """Turn dropout off in a model, as in the rollout. Its configuration, which a checkpoint saves, stays as it is."""
    found: dict[str, float] = {}
    for module in model.modules():
        for name in DROPOUTS:
            if p := getattr(module, name, 0.0):
                found[name] = p
                setattr(module, name, 0.0)
    if found:
        given = " and ".join(f"{name}={p:g}" for name, p in found.items())
        logger.warning("jetrl_patch: exact mode trains without dropout, as the rollout samples. Not applied: %s", given)


def _check_exact(model: Any) -> dict[str, type]:
    """Return class name -> exact counterpart for the model's family."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    te = next((name for name, module in model.named_modules() if is_te_linear(module)), None)
    if te is not None:
        raise ModelError(
            explain(
                "align='exact'",
                required="batch-invariant GEMMs",
                found=f"TransformerEngine, whose GEMM is not, in {te}",
                fix="use align='linear'",
            )
        )
    family = check_family(model.config)
    kinds: dict[str, type] = {
        family.norm: modules.ExactNorm,
        family.rotary: modules.ExactRotary,
        family.mlp: modules.ExactMLP,
    }
    if family.mixture:
        kinds[family.router] = modules.ExactScores if family.chooser else modules.ExactRouter
    if family.chooser:
        kinds[family.chooser] = modules.ExactChoice
    known_kinds = {*kinds, family.experts} if family.mixture else {*kinds}
    for name, module in model.named_modules():
        known = isinstance(module, (nn.Linear, nn.Embedding, modules.ExactNorm)) or type(module).__name__ in known_kinds
        if not known and next(module.parameters(recurse=False), None) is not None:
            raise ModelError(
                explain(
                    f'align="exact" of {name}',
                    required=f"linears, embeddings and {family.norm}, as transformers builds {family.causal_lm}",
                    found=type(module).__name__,
                    fix='turn off what replaced it, or use align="linear"',
                )
            )
    if NAME not in ALL_ATTENTION_FUNCTIONS.valid_keys():
        raise NotPatchedError(
            f"the attention {NAME!r} is not registered with transformers in this process. Call jetrl_patch.enable() before "
            "the model is prepared."
        )
    if not isinstance(getattr(model, "lm_head", None), nn.Linear):
        raise ModelError(f"{type(model).__name__} has no lm_head: exact mode prepares causal language models")
    return kinds


def _make_exact(model: Any, kinds: dict[str, type], rollout_tp: int) -> None:
    for name, module in model.named_modules():
        if (exact := kinds.get(type(module).__name__)) is not None:
            modules.swap(module, exact)
        elif isinstance(module, nn.Embedding):
            modules.swap(module, modules.ExactEmbedding)
        elif type(module) is nn.Linear:
            modules.swap(module, modules.ExactLinear)
            module.jetrl_splits = rollout_tp if is_row_parallel(name) else 1
    model.config._attn_implementation = NAME
