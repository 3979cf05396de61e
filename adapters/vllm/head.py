"""The BF16 GEMMs of exact mode: ``lm_head``, and the linears that ``exclude`` names.

vLLM on CPU packs these weights once after loading, so a later weight update has no effect, and its GEMM rounds
differently for different batch sizes. Here the GEMM reads the live weight and is batch-invariant: a row's bits depend on
that row alone. The trainer uses the same GEMM.
"""

from __future__ import annotations

import torch
from vllm.model_executor.layers.linear import UnquantizedLinearMethod, register_weight_loader_v2_supported_method
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from jetrl_patch.exact import ops

__all__ = ["ExactHeadMethod", "ExactLinearMethod"]


class ExactHeadMethod(UnquantizedEmbeddingMethod):
    """For ``lm_head``, and for the embedding if the two are tied.

    Args:
        fp32: whether logits stay unrounded (``head_dtype="float32"``).
    """

    def __init__(self, fp32: bool = False) -> None:
        super().__init__()
        self.fp32 = fp32

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Nothing: the weight is used as loaded."""

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``x [M, K]`` BF16 -> logits ``[M, V]`` BF16 or FP32 of this rank's part of the vocabulary."""
        product = ops.head_linear_fp32 if self.fp32 else ops.head_linear
        logits = product(x, layer.weight.data)
        return logits if bias is None else logits + bias


@register_weight_loader_v2_supported_method
class ExactLinearMethod(UnquantizedLinearMethod):
    """For linears that are BF16 on both sides."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Nothing: the weight is used as loaded."""

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``x [..., K]`` BF16 -> ``[..., N]`` BF16; the bias is added after rounding."""
        return ops.linear(x, layer.weight.data, bias)

    def partial_sum(self, layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        """``x [M, K of this rank]`` BF16 -> the unrounded FP32 sum ``[M, N]``."""
        return ops.partial_sum(x, layer.weight.data)
