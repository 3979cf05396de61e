"""Convert a Hugging Face model for the trainer: FP8 linears and experts, and in exact mode the rollout's other ops."""

from __future__ import annotations

import logging
from collections.abc import Collection
from functools import partial
from typing import Any

from torch import Tensor, nn

from jetrl_patch import session
from jetrl_patch.backends import choose_backend
from jetrl_patch.backends.transformer_engine import is_te_linear
from jetrl_patch.config import Config
from jetrl_patch.config.formats import Format
from jetrl_patch.errors import ModelError, NotPatchedError, explain
from jetrl_patch.exact import latent, modules, tower
from jetrl_patch.exact.delta_net_modules import ExactDeltaNet, ExactGatedNorm, ExactOnePlusNorm, pass_positions
from jetrl_patch.exact.head import check_head, widen_head
from jetrl_patch.exact.hf_attention import NAME, ExactLatentAttention, round_embeddings
from jetrl_patch.exact.modules import check_family
from jetrl_patch.exact.trial import choose_ops
from jetrl_patch.fp8.convert import expert_modules, experts_of, split_layers, swap_linears
from jetrl_patch.fp8.experts import experts_forward
from jetrl_patch.fp8.fused import fuse, rotate_together
from jetrl_patch.models.families import ABSORBED, covering, record_of
from jetrl_patch.models.family import DROPOUTS
from jetrl_patch.models.layers import cut_words, in_tower, is_row_parallel
from jetrl_patch.models.structure import check_device, text_config

# ---- Experts in FP8, through transformers' registry of experts implementations -------------------

#: its name in transformers: ``experts_implementation="jetrl_fp8"``
EXPERTS = "jetrl_fp8"


def fp8_experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """transformers' experts function: tokens [T, H], experts and weights [T, k] -> BF16 [T, H].

    Raises ModelError for a module that ``prepare_model`` has not converted.
    """
    own = experts_of(self)
    if own is None:
        found, fix = f"an unprepared {type(self).__name__}", "leave experts_implementation unset: the plugin sets it"
        raise ModelError(explain(f"experts_implementation={EXPERTS!r}", required="a prepared model", found=found, fix=fix))
    return experts_forward(hidden_states, self.gate_up_proj, self.down_proj, top_k_weights, top_k_index, own)


def _require_registered(registered: Collection[str], name: str, what: str) -> None:
    if name not in registered:
        raise NotPatchedError(
            f"the {what} {name!r} is not registered with transformers in this process. Call jetrl_patch.enable() before the "
            "model is prepared."
        )


# ---- Convert a model -----------------------------------------------------------------------------

logger = logging.getLogger(__name__)


def prepare_model(
    model: nn.Module, config: Config, rollout_tp: int = 1, device_type: str = "cpu", rollout_ep: int = 1
) -> list[str]:
    """Convert a causal language model in place, before it is wrapped by FSDP or ZeRO.

    All checks run before any change. Parameters keep their names, dtypes and identity; meta tensors stay meta.

    Args:
        model: a Hugging Face model with an ``lm_head``.
        rollout_tp, rollout_ep: tensor- and expert-parallel size of the rollout. The trainer adds the same partial sums in the
            same order.
        device_type: device the model will run on; decides the backend.

    Returns:
        Names of the quantized layers: those converted here or, if only the rollout is quantized, those that the rollout
        quantizes. Empty in BF16.

    Raises:
        ModelError: the model cannot be converted.
        ConfigError: this machine lacks the backend or the exact ops.
        NotPatchedError: the exact attention, or the implementation of experts, is not registered with transformers.
    """
    if config.fp32_head:
        check_head(model)
    names, cut = split_layers(model, config, rollout_tp, rollout_ep) if config.quantized_rollout else ([], [])
    if config.fp8_train and expert_modules(model):
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        _require_registered(ALL_EXPERTS_FUNCTIONS.valid_keys(), EXPERTS, "experts implementation")
        check_device(model.config, device_type)
    if cut:
        note_cut(cut, rollout_tp, config.scales)
    if not config.fp8_train:
        if config.fp32_head:
            widen_head(model, config)
        return names
    if config.exact:
        kinds = _check_exact(model)
        choose_ops(model.config, config, device_type)
    backend = choose_backend(config.backend, device_type, config.scale_format)
    swap_linears(model, config.exclude, config.scale_format, backend, rollout_tp, names, rollout_ep, config.exact)
    if expert_modules(model):  # the plugin's implementation, in FP8 or in BF16
        model.config._experts_implementation = EXPERTS
        _keep(model, "_experts_implementation")
    if config.fp32_head:
        widen_head(model, config)  # before the swaps below, which then leave it alone
    if config.exact:
        _make_exact(model, kinds, rollout_tp)
        drop_nothing(model)
    fuse(model, backend, device_type)
    rotate_together(model, backend, device_type)
    return names


def note_cut(layers: list[str], tp: int, form: Format) -> None:
    """Record the layers that ``on_cut="bf16"`` leaves in BF16, and log new ones."""
    if set(layers) - set(session.run_notes().cut):
        logger.warning("jetrl_patch: on_cut='bf16': %s", cut_words(layers, tp, form))
    session.register(cut=layers)


def drop_nothing(model: Any) -> None:
    """Turn a model's dropout off, because the rollout has none. Its configuration, which checkpoints save, does not change."""
    found: dict[str, float] = {}
    for module in model.modules():
        for name in DROPOUTS:
            if p := getattr(module, name, 0.0):
                found[name] = p
                setattr(module, name, 0.0)
    if found:
        given = " and ".join(f"{name}={p:g}" for name, p in found.items())
        logger.warning("jetrl_patch: exact mode trains without dropout, because the rollout has none. Not applied: %s", given)


def _check_exact(model: Any) -> dict[str, type]:
    """Return class name -> exact counterpart for the model's family."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    te = next((name for name, module in model.named_modules() if is_te_linear(module)), None)
    if te is not None:
        found, fix = f"TransformerEngine in {te}, whose GEMM depends on the batch", "use align='linear'"
        raise ModelError(explain("align='exact'", required="batch-invariant GEMMs", found=found, fix=fix))
    family = check_family(model.config)
    kinds: dict[str, type] = {family.norm: modules.ExactNorm, family.rotary: modules.ExactRotary}
    for other in covering("exact").values():  # some families have the MLP of another one
        kinds[other.mlp] = modules.ExactMergedMLP if other.merges_gate else modules.ExactMLP
    if family.chooser and any(hasattr(module, "route_tokens_to_experts") for module in model.modules()):
        kinds |= {family.router: modules.ExactScores, family.chooser: modules.ExactChoice}
    elif family.mixture:
        kinds[family.router] = modules.ExactSigmoidRouter if family.chooser else modules.ExactRouter
    if family.absorbed:
        kinds[family.attention] = ExactLatentAttention
    if family.delta_net:
        kinds |= {family.norm: ExactOnePlusNorm, family.gated_norm: ExactGatedNorm, family.delta_rule: ExactDeltaNet}
    known_kinds = {*kinds, *family.experts, *(("Conv1d",) if family.delta_net else ())}
    for name, module in model.named_modules():
        if max_norm := getattr(module, "max_norm", None):
            required, fix = "an embedding whose lookup changes no weight", "set max_norm=None"
            raise ModelError(explain(f'align="exact" of {name}', required=required, found=f"max_norm={max_norm}", fix=fix))
        if in_tower(name):
            if _is_tower(name):
                tower.check(module, name)
            continue
        known = isinstance(module, (nn.Linear, nn.Embedding, modules.ExactNorm)) or type(module).__name__ in known_kinds
        if not known and next(module.parameters(recurse=False), None) is not None:
            required = f"linears, embeddings and {family.norm}, as transformers builds {family.causal_lm}"
            found, fix = type(module).__name__, 'turn off what replaced it, or use align="linear"'
            raise ModelError(explain(f'align="exact" of {name}', required=required, found=found, fix=fix))
    _require_registered(ALL_ATTENTION_FUNCTIONS.valid_keys(), NAME, "attention")
    if not isinstance(getattr(model, "lm_head", None), nn.Linear):
        raise ModelError(f"{type(model).__name__} has no lm_head, which exact mode needs. Use align='linear'.")
    return kinds


def _make_exact(model: Any, kinds: dict[str, type], rollout_tp: int) -> None:
    for name, module in model.named_modules():
        if in_tower(name):
            if _is_tower(name):
                tower.make_exact(module)
        elif (exact := kinds.get(type(module).__name__)) is not None:
            modules.swap(module, exact)
        elif isinstance(module, nn.Embedding):
            modules.swap(module, modules.ExactEmbedding)
        elif type(module) is nn.Linear and name.rpartition(".")[2] in ABSORBED:
            modules.swap(module, latent.ExactAbsorbed)
        elif type(module) is nn.Linear:
            modules.swap(module, modules.ExactLinear)
            module.jetrl_splits = rollout_tp if is_row_parallel(name) else 1
        if hasattr(module, "linear_attn"):
            module.register_forward_pre_hook(pass_positions, with_kwargs=True)
    text_config(model.config)._attn_implementation = NAME
    _keep(model, "_attn_implementation")
    _decoder(model).register_forward_pre_hook(round_embeddings, with_kwargs=True)


def _decoder(model: Any) -> nn.Module:
    found: nn.Module = model.get_submodule(record_of(model.config).decoder)
    return found


def _keep(model: Any, setting: str) -> None:
    """Let each forward pass require that a setting of the configuration is what it is now.

    transformers can change these of a model that is built (``set_attn_implementation``), which would undo a part of its
    conversion without a word.
    """
    kept = getattr(text_config(model.config), setting)
    _decoder(model).register_forward_pre_hook(partial(_require_kept, setting, kept))


def _require_kept(setting: str, kept: str, decoder: Any, _args: Any) -> None:
    if (found := getattr(decoder.config, setting)) != kept:
        fix = "convert the model after the last change of it"
        raise ModelError(explain(f"{setting[1:]} of a converted model", required=kept, found=found, fix=fix))


def _is_tower(name: str) -> bool:
    """Whether ``name`` is a vision tower, not a part of one."""
    return in_tower(name) and not in_tower(name.rpartition(".")[0])
