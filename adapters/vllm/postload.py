"""Tensors that vLLM derives from its weights after loading: recomputed after each weight sync, or refused.

A weight sync writes parameters through their loaders. It does not run vLLM's ``process_weights_after_loading``, because most
implementations cannot run twice on the same weights.
"""

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
from jetrl_patch.adapters.vllm.method import QuantizedLinearMethod
from jetrl_patch.adapters.vllm.ops import ExactHeadMethod, ExactLinearMethod
from jetrl_patch.errors import UNQUANTIZED, ModelError, explain
from jetrl_patch.models.families import FAMILIES

# ---- Latent attention (MLA): recompute the absorbed weights after each sync ----------------------
# Each token's keys and values are compressed to one vector, which ``kv_b_proj [H (P + V), L]`` expands for all heads. A prefill
# expands it. A decoding step leaves it compressed, and multiplies the query of each head by ``W_UK_T [H, P, L]`` and the result
# of attention by ``W_UV [H, L, V]``, in BF16. ``MLAAttention.process_weights_after_loading`` derives both from ``kv_b_proj``:
# views if the weight is BF16 (vLLM 0.24 to 0.32), dequantized copies if it is FP8, packed copies for AMX. If a sync wrote only
# the weight, decoding steps would silently use copies of the old one. In exact mode every step reads the weight (``latent``).
#
# The layer stays in BF16 on both sides (``families.ABSORBED``): in FP8, prefills and the trainer would quantize its input, but
# decoding steps would not.

#: vLLM's step after loading
AFTER_LOADING = "process_weights_after_loading"
#: the derived tensors, unless packed; the last one exists only with decode context parallelism and covers all ranks
_MADE = ("W_UV", "W_UK_T", "W_UK_T_dcp_qrep")


def latent_modules(model: nn.Module) -> list[Any]:
    """The latent attention of each block of a loaded vLLM model."""
    return [module for module in model.modules() if is_handled(module)]


def is_handled(module: Any) -> bool:
    """Whether the module is vLLM's own dense latent attention with ``kv_b_proj`` in BF16."""
    from vllm.model_executor.layers.attention import MLAAttention

    if not isinstance(module, MLAAttention) or getattr(type(module), AFTER_LOADING) is not getattr(MLAAttention, AFTER_LOADING):
        return False
    method = getattr(getattr(module, "kv_b_proj", None), "quant_method", None)
    return isinstance(method, UnquantizedLinearMethod) and not getattr(module.impl, "is_sparse", False)


def made(model: nn.Module) -> set[int]:
    """The ids of parameters that vLLM has derived from others. No sync sends them."""
    found = (getattr(module, name, None) for module in latent_modules(model) for name in _MADE)
    return {id(tensor) for tensor in found if tensor is not None}


@torch.no_grad()
def absorb(model: nn.Module) -> None:
    """Recompute them in all blocks, in place, because captured graphs hold their addresses."""
    for module in latent_modules(model):
        held = {name: getattr(module, name, None) for name in _MADE}
        getattr(module, AFTER_LOADING)(torch.bfloat16)
        for name, old in held.items():
            new = getattr(module, name, None)
            if old is not None and new is not None and new.data_ptr() != old.data_ptr():
                old.data.copy_(new)
                setattr(module, name, old)


def follow_norms(model: nn.Module, text_config: Any) -> None:
    """Give the norms inside latent attention the epsilon that transformers' code sets. vLLM uses ``rms_norm_eps``."""
    latent = [module for module in model.modules() if hasattr(module, "kv_a_layernorm")]
    if not latent:
        return
    family = FAMILIES[text_config.model_type]
    code = importlib.import_module(f"transformers.models.{family.model_type}.modeling_{family.model_type}")
    # only the attention: vLLM has written its own name for the rotary angles into text_config, so no whole model can be built
    with torch.device("meta"):
        theirs = getattr(code, family.attention)(text_config, 0)
    for module in latent:
        for name in ("q_a_layernorm", "kv_a_layernorm"):
            norm = getattr(module, name, None)
            if norm is not None:
                norm.variance_epsilon = getattr(theirs, name).variance_epsilon


# ---- Refuse models with other layers that vLLM transforms after loading --------------------------
# For example, vLLM repacks experts and converts attention sinks. After a sync the engine would still compute with the old ones.

#: methods that compute with the weight as loaded; on a CPU ``fixes.keep_live_weight`` renews the packed copies of the last two
_LIVE = (
    QuantizedLinearMethod,
    QuantizedExpertsMethod,
    ExactLinearMethod,
    ExactHeadMethod,
    UnquantizedLinearMethod,
    UnquantizedEmbeddingMethod,
)


def check_layers(model: torch.nn.Module) -> None:
    """Raise ModelError for a loaded vLLM model with a layer that a weight sync would update only in part."""
    kinds = {kind: name for name, kind in _transformed(model)}
    if kinds:
        kind, name = next(iter(kinds.items()))
        more = f" and {len(kinds) - 1} more kinds" if len(kinds) > 1 else ""
        what, required = f"weight sync to {type(model).__name__}", "layers that compute with their weights as loaded"
        found = f"{kind} ({name or 'the model'}){more}, which vLLM transforms after loading"
        raise ModelError(explain(what, required=required, found=found, fix=f"use another model, or {UNQUANTIZED}"))


def _transformed(model: torch.nn.Module) -> Iterator[tuple[str, str]]:
    """Yield name and kind of each layer whose weights vLLM transforms."""
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        own = getattr(type(method), AFTER_LOADING, None) is not getattr(QuantizeMethodBase, AFTER_LOADING)
        if isinstance(method, QuantizeMethodBase) and own and type(method) not in _LIVE:
            yield name, type(method).__name__
        if callable(getattr(module, AFTER_LOADING, None)) and not _is_plain_attention(module) and not is_handled(module):
            yield name, type(module).__name__


def _is_plain_attention(module: Any) -> bool:
    """Whether the step changes nothing here: ordinary attention without sinks, or a vision tower's attention without FP8.

    Ordinary attention calls its backend, which converts attention sinks. A vision tower prepares scales for FP8 attention.
    """
    own = getattr(getattr(type(module), AFTER_LOADING, None), "__qualname__", "")
    if own == f"MMEncoderAttention.{AFTER_LOADING}":
        return not getattr(module, "fp8_enabled", False)
    if own != f"Attention.{AFTER_LOADING}":
        return False
    impl = module.impl
    variants = impl.get_impl_variants() if hasattr(impl, "get_impl_variants") else (impl,)
    return all(getattr(variant, "sinks", None) is None for variant in variants)
