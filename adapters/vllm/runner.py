"""The runner of a mixture: it returns the experts of each token, and in exact mode it leaves the sum over the ranks to others.

vLLM returns the experts of each token (``enable_return_routed_experts``) from its own routers, or from a module with a
``capture_fn``. The runner is such a module, because in exact mode the experts method routes.

vLLM adds the routed and the shared experts of each rank in BF16 and reduces the sum over the ranks. In exact mode each of the
two is complete, and rounded once, before they are added, as in the trainer: the experts method and ``ExactRowParallelLinear``
add the ranks' FP32 sums. So the down projection of shared experts, which vLLM builds without a reduction of its own, gets one,
and the runner loses its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.linear import RowParallelLinear

from jetrl_patch.adapters.vllm.experts import QuantizedExpertsMethod
from jetrl_patch.exact.modules import swap

__all__ = ["finish"]


class CapturingRunner(MoERunner):
    """Hands the experts that the method computes with to whom vLLM returns them."""

    routed_experts: Any

    @property
    def capture_fn(self) -> Callable[[torch.Tensor], None] | None:
        """Takes the experts [T, k] that the method computes with."""
        found: Callable[[torch.Tensor], None] | None = self.routed_experts.quant_method.capture
        return found

    @capture_fn.setter
    def capture_fn(self, capture: Callable[[torch.Tensor], None] | None) -> None:
        self.routed_experts.quant_method.capture = capture


class CompleteRunner(CapturingRunner):
    """Adds routed and shared experts that are the same on every rank."""

    def _maybe_reduce_final_output(
        self, states: torch.Tensor, trunc_size: int | None, output_is_reduced: bool | None = None
    ) -> torch.Tensor:
        return states if trunc_size is None else states[..., :trunc_size]


def finish(model: torch.nn.Module) -> None:
    """Give a loaded model's mixtures their runner and, in exact mode, move their reductions. A second call changes nothing."""
    for module in model.modules():
        if not isinstance(module, MoERunner):
            continue
        method = module.routed_experts.quant_method
        if not isinstance(method, QuantizedExpertsMethod):
            continue
        if not method.exact:
            swap(module, CapturingRunner)
            continue
        swap(module, CompleteRunner)
        for layer in module.shared_experts.modules() if module.shared_experts is not None else ():
            if isinstance(layer, RowParallelLinear):
                layer.reduce_results = True
