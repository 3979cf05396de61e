"""Refuse models with layers that vLLM transforms once after loading.

A weight sync writes parameters through their loaders and leaves vLLM's ``process_weights_after_loading`` out: most of its
transforms do not bear a second run on weights that they have changed. For layers that need it (experts are repacked, sinks are
converted) the engine would go on computing with the old weights. Latent attention bears it, and gets it (``latent``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from jetrl_patch.adapters.vllm.experts import QuantizedExpertsMethod
from jetrl_patch.adapters.vllm.head import ExactHeadMethod, ExactLinearMethod
from jetrl_patch.adapters.vllm.latent import AFTER_LOADING, is_handled
from jetrl_patch.adapters.vllm.method import QuantizedLinearMethod
from jetrl_patch.errors import UNQUANTIZED, ModelError, explain

__all__ = ["check_layers"]

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
