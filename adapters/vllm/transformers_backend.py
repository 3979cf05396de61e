"""Finish exact mode for models that vLLM runs through its transformers backend.

vLLM replaces linears, norms, MLPs and attention in transformers' model with its own, most of which the table of
out-of-tree ops makes exact. Two remain after loading: the rotary embedding, which is still transformers' module and needs
the trainer's swap, and the norms, a subclass whose name is not in the table.
"""

from __future__ import annotations

from torch import nn
from vllm.model_executor.layers.layernorm import RMSNorm

from jetrl_patch.adapters.vllm.ops import ExactRMSNorm
from jetrl_patch.errors import ModelError, explain
from jetrl_patch.exact.modules import ExactRotary, swap
from jetrl_patch.families import Family

__all__ = ["finish"]


def finish(model: nn.Module, family: Family) -> None:
    """Swap the remaining modules of a loaded model, in place.

    Raises:
        ModelError: a transformers module has no exact counterpart; the error names it.
    """
    for name, module in model.named_modules():
        kind = type(module).__name__
        if kind == family.rotary:
            swap(module, ExactRotary)
        elif isinstance(module, RMSNorm) and not isinstance(module, ExactRMSNorm):
            swap(module, ExactRMSNorm)
        elif kind == family.norm or isinstance(module, nn.Linear) or hasattr(module, "gate_proj"):
            raise ModelError(
                explain(
                    f"align='exact' of {name} in vLLM's transformers backend",
                    required="vLLM's own linears, norms and gated MLPs, which it puts into transformers' model",
                    found=f"transformers' {kind}",
                    fix="use align='linear'",
                )
            )
