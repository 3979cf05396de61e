"""Exact routing by a sigmoid, in models whose router vLLM builds as torch's own linear layer in FP32.

vLLM rounds the sum over the routed experts to BF16 and then multiplies it by the model's factor. The trainer multiplies the
routing weights, in FP32, so that the sum is rounded once. Here the factor moves from vLLM's runner to the experts method.
"""

from __future__ import annotations

from torch import nn
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

from jetrl_patch.adapters.vllm.experts import QuantizedExpertsMethod
from jetrl_patch.exact.modules import ExactScores, swap

__all__ = ["finish"]


def finish(model: nn.Module) -> None:
    """Swap the routers of a loaded model and move its factors, in place. A second call changes nothing."""
    for module in model.modules():
        if type(module) is nn.Linear:
            swap(module, ExactScores)
        elif isinstance(module, MoERunner):
            method = module.routed_experts.quant_method
            assert isinstance(method, QuantizedExpertsMethod)
            method.scale, module.routed_scaling_factor = method.scale * module.routed_scaling_factor, 1.0
