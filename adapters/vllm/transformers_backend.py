"""Models that vLLM runs by transformers' code, with its own layers put in: what is left to make exact after loading.

vLLM finds linears, norms, MLPs and attention in transformers' model and puts its own there, most of which its table of
out-of-tree ops has replaced by ours. Two things stay: the rotary embedding is transformers' module, whose tables are the
trainer's only after the trainer's swap, and norms are a subclass of vLLM's that the table does not know by its name.
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
    """Swap what is left in a loaded model, in place.

    Raises:
        ModelError: a module of transformers that computes and has no exact counterpart, with its name.
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
