"""Latent attention (MLA) in vLLM: what it makes of its weights once after loading is made again after each weight sync.

Keys and values of a token are compressed to one vector, of which ``kv_b_proj [H (P + V), L]`` makes those of all heads. vLLM
does so in a prefill. While it decodes, it leaves the vectors compressed, and multiplies the query of each head by its
``W_UK_T [H, P, L]`` and what attention returns by its ``W_UV [H, L, V]``, in BF16. ``process_weights_after_loading`` of its
``MLAAttention`` makes both of that weight: views where it is BF16 (vLLM 0.24 to 0.32), copies of what FP8 means, or packed ones
for AMX. A sync that wrote a weight and not its copies would leave decoding steps with the attention of older weights, without an
error.

The layer stays in BF16 on both sides (``families.ABSORBED``): in FP8 its input would be quantized in prefills and in the
trainer, and not in decoding steps.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from jetrl_patch.families import FAMILIES

__all__ = ["AFTER_LOADING", "absorb", "follow_norms", "is_handled", "latent_modules", "made"]

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
