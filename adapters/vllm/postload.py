"""What vLLM makes of its weights once after loading: made again after each weight sync, or refused."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from jetrl_patch.adapters.vllm.experts import QuantizedExpertsMethod
from jetrl_patch.adapters.vllm.head import ExactHeadMethod, ExactLinearMethod
from jetrl_patch.adapters.vllm.method import QuantizedLinearMethod
from jetrl_patch.errors import UNQUANTIZED, ModelError, explain
from jetrl_patch.models.families import FAMILIES

__all__ = ["AFTER_LOADING", "absorb", "check_layers", "follow_norms", "is_handled", "latent_modules", "made"]


# ---- Latent attention (MLA) in vLLM: what it makes of its weights once after loading is made again after each weight sync
# Keys and values of a token are compressed to one vector, of which ``kv_b_proj [H (P + V), L]`` makes those of all heads. vLLM
# does so in a prefill. While it decodes, it leaves the vectors compressed, and multiplies the query of each head by its
# ``W_UK_T [H, P, L]`` and what attention returns by its ``W_UV [H, L, V]``, in BF16. ``process_weights_after_loading`` of its
# ``MLAAttention`` makes both of that weight: views where it is BF16 (vLLM 0.24 to 0.32), copies of what FP8 means, or packed ones
# for AMX. A sync that wrote a weight and not its copies would leave decoding steps with the attention of older weights, without
# an error.
#
# The layer stays in BF16 on both sides (``families.ABSORBED``): in FP8 its input would be quantized in prefills and in the
# trainer, and not in decoding steps.

#: the step that vLLM takes once, after it has loaded a model
AFTER_LOADING = "process_weights_after_loading"
#: what vLLM makes, unless packed; the last one of all ranks, with decode context parallelism
_MADE = ("W_UV", "W_UK_T", "W_UK_T_dcp_qrep")


def latent_modules(model: nn.Module) -> list[Any]:
    """The latent attention of each block of a built vLLM model."""
    return [module for module in model.modules() if is_handled(module)]


def is_handled(module: Any) -> bool:
    """Whether the module is vLLM's own latent attention, over a ``kv_b_proj`` in BF16, and not sparse."""
    from vllm.model_executor.layers.attention import MLAAttention
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    if not isinstance(module, MLAAttention) or getattr(type(module), AFTER_LOADING) is not getattr(MLAAttention, AFTER_LOADING):
        return False
    method = getattr(getattr(module, "kv_b_proj", None), "quant_method", None)
    return isinstance(method, UnquantizedLinearMethod) and not getattr(module.impl, "is_sparse", False)


def made(model: nn.Module) -> set[int]:
    """The ids of the parameters that vLLM has made of others: no sync sends them."""
    found = (getattr(module, name, None) for module in latent_modules(model) for name in _MADE)
    return {id(tensor) for tensor in found if tensor is not None}


@torch.no_grad()
def absorb(model: nn.Module) -> None:
    """Make them again in all blocks, each in its place: captured graphs have their addresses."""
    for module in latent_modules(model):
        held = {name: getattr(module, name, None) for name in _MADE}
        getattr(module, AFTER_LOADING)(torch.bfloat16)
        for name, old in held.items():
            new = getattr(module, name, None)
            if old is not None and new is not None and new.data_ptr() != old.data_ptr():
                old.data.copy_(new)
                setattr(module, name, old)


def follow_norms(model: nn.Module, hf_config: Any) -> None:
    """Give norms inside latent attention the trainer's epsilon, which stands in transformers' code; vLLM has ``rms_norm_eps``.

    Args:
        hf_config: that of the language model.
    """
    found = [module for module in model.modules() if hasattr(module, "kv_a_layernorm")]
    if not found:
        return
    theirs = _attention(hf_config)
    for module in found:
        for name in ("q_a_layernorm", "kv_a_layernorm"):
            norm = getattr(module, name, None)
            if norm is not None:
                norm.variance_epsilon = getattr(theirs, name).variance_epsilon


def _attention(hf_config: Any) -> Any:
    """The attention of a block of the trainer, without memory.

    Not that of a whole model: vLLM has written the name of its own rotary angles into the configuration.
    """
    family = FAMILIES[hf_config.model_type]
    module = importlib.import_module(f"transformers.models.{family.model_type}.modeling_{family.model_type}")
    with torch.device("meta"):
        return getattr(module, family.attention)(hf_config, 0)


# ---- Refuse models with layers that vLLM transforms once after loading ---------------------------
# A weight sync writes parameters through their loaders and leaves vLLM's ``process_weights_after_loading`` out: most of its
# transforms do not bear a second run on weights that they have changed. For layers that need it (experts are repacked, sinks are
# converted) the engine would go on computing with the old weights. Latent attention bears it, and gets it (``latent``).

#: methods that compute with the weight as it is loaded; on a CPU ``live.py`` packs the copy of the last two again
_LIVE = (
    QuantizedLinearMethod,
    QuantizedExpertsMethod,
    ExactLinearMethod,
    ExactHeadMethod,
    UnquantizedLinearMethod,
    UnquantizedEmbeddingMethod,
)


def check_layers(model: torch.nn.Module) -> None:
    """Raise ModelError for a built vLLM model with a layer that a weight sync would leave half updated."""
    found = {kind: name for name, kind in _transformed(model)}
    if found:
        kind, name = next(iter(found.items()))
        more = f" and {len(found) - 1} more kinds" if len(found) > 1 else ""
        raise ModelError(
            explain(
                f"weight sync to {type(model).__name__}",
                required="layers that compute with their weights as loaded",
                found=f"{kind} ({name or 'the model'}){more}, which vLLM transforms after loading",
                fix=f"use another model, or {UNQUANTIZED}",
            )
        )


def _transformed(model: torch.nn.Module) -> Iterator[tuple[str, str]]:
    """Yield name and kind of each layer whose weights vLLM transforms."""
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if _transforms(method, QuantizeMethodBase) and type(method) not in _LIVE:
            yield name, type(method).__name__
        if callable(getattr(module, AFTER_LOADING, None)) and not _is_plain_attention(module) and not is_handled(module):
            yield name, type(module).__name__


def _transforms(method: Any, base: type) -> bool:
    return isinstance(method, base) and getattr(type(method), AFTER_LOADING) is not getattr(base, AFTER_LOADING)


def _is_plain_attention(module: Any) -> bool:
    """Whether the layer has vLLM's ordinary attention, which asks its backend alone; a backend converts attention sinks.

    Or a vision tower's, which prepares nothing but the scales of attention in FP8.
    """
    own = getattr(getattr(type(module), AFTER_LOADING, None), "__qualname__", "")
    if own == f"MMEncoderAttention.{AFTER_LOADING}":
        return not getattr(module, "fp8_enabled", False)
    if own != f"Attention.{AFTER_LOADING}":
        return False
    impl = module.impl
    variants = impl.get_impl_variants() if hasattr(impl, "get_impl_variants") else (impl,)
    return all(getattr(variant, "sinks", None) is None for variant in variants)
