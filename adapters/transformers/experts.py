"""The experts of a mixture in FP8, through transformers' own registry of experts implementations."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from jetrl_patch.errors import ModelError, NotPatchedError, explain
from jetrl_patch.fp8.expert_layers import expert_modules, experts_of
from jetrl_patch.fp8.experts import experts_forward
from jetrl_patch.structure import check_device

__all__ = ["EXPERTS", "check_registered", "fp8_experts", "use_fp8_experts"]

#: its name in transformers: ``experts_implementation="jetrl_fp8"``
EXPERTS = "jetrl_fp8"


def fp8_experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """transformers' experts function: tokens [T, H], experts and weights [T, k] -> BF16 [T, H].

    Raises ModelError for a module that ``prepare_model`` has not seen.
    """
    own = experts_of(self)
    if own is None:
        fix = "leave experts_implementation unset: the plugin sets it"
        found = f"a {type(self).__name__} that was not"
        raise ModelError(explain(f"experts_implementation={EXPERTS!r}", required="a prepared model", found=found, fix=fix))
    return experts_forward(hidden_states, self.gate_up_proj, self.down_proj, top_k_weights, top_k_index, own)


def check_registered(model: Any, device_type: str) -> None:
    """Check that a model's experts can become FP8 here; nothing to check without any.

    Raises:
        NotPatchedError: the implementation is not registered with transformers.
        ModelError: the device is not a CPU.
    """
    if not expert_modules(model):
        return
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    if EXPERTS not in ALL_EXPERTS_FUNCTIONS.valid_keys():
        raise NotPatchedError(
            f"the experts implementation {EXPERTS!r} is not registered with transformers in this process. Call "
            "jetrl_patch.enable() before the model is prepared."
        )
    check_device(model.config, device_type)


def use_fp8_experts(model: Any) -> None:
    """Let the experts of a converted model, if it has any, compute as they were prepared: in FP8, or in BF16."""
    if expert_modules(model):
        model.config._experts_implementation = EXPERTS
