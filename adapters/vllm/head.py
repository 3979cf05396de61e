"""The products of the rollout that are not FP8: exact BF16 GEMMs, and INT8."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from vllm.model_executor.layers.linear import UnquantizedLinearMethod, register_weight_loader_v2_supported_method
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from jetrl_patch.adapters.vllm.formats import LinearFormat, RowScales
from jetrl_patch.backends import rowwise
from jetrl_patch.backends.quantize import Quantized
from jetrl_patch.backends.row_equality import TRAINED
from jetrl_patch.backends.rowwise import quantize_int8_rows
from jetrl_patch.exact import ops

if TYPE_CHECKING:
    from jetrl_patch.backends.row_equality import Layout

__all__ = ["ChannelInt8", "ExactHeadMethod", "ExactLinearMethod"]


# ---- INT8 ----------------------------------------------------------------------------------------
# Weights have one scale per output channel and are installed as the trainer sends them. Activations have one scale per token. The
# GEMM is exact in int32. On CUDA it uses vLLM's own kernels if they apply (not yet run on a GPU), otherwise torch's.

class ChannelInt8(LinearFormat):
    """int8 with per-channel weight scales and per-token activation scales."""

    dtype = torch.int8
    scales = RowScales()
    _mm: rowwise.IntMM | None = None

    def check_width(self, name: str, K: int) -> None:
        """Raise ModelError for a layer too wide for an int32 sum."""
        rowwise.check_width(name, K)

    def check_serving(self, weight: torch.Tensor, layout: Layout | None = None, most: int = TRAINED) -> None:
        """Choose the integer product."""
        self._mm = rowwise.choose(self.config.backend, weight.device.type)

    def compiled_rows(self, device: torch.device, most: int) -> Sequence[int]:
        """Return nothing: vLLM's kernels are in its wheel."""
        return ()

    def quantize(self, w_NK: torch.Tensor) -> Quantized:
        """Scales [N, 1]."""
        return quantize_int8_rows(w_NK)

    def product(self, x_MK: torch.Tensor, w: Quantized, out_dtype: torch.dtype) -> torch.Tensor:
        """Use vLLM's kernels on CUDA, else torch's or the reference."""
        name = self.config.backend
        if x_MK.is_cuda and name != "torch" and out_dtype == torch.bfloat16:
            return _vllm_product(x_MK, *w)
        if self._mm is None:
            self._mm = rowwise.choose(name, x_MK.device.type)
        return rowwise.int8_fprop(x_MK, w, out_dtype, self._mm)


def _vllm_product(x_MK: torch.Tensor, w_NK: torch.Tensor, s_N1: torch.Tensor) -> torch.Tensor:
    """Use vLLM's quantizer and CUTLASS GEMM (Triton for widths CUTLASS does not support). Not yet run on a GPU."""
    from vllm import _custom_ops

    q_MK, s_M1, _ = _custom_ops.scaled_int8_quant(x_MK.contiguous(), symmetric=True)
    return _custom_ops.cutlass_scaled_mm(q_MK, w_NK.t(), scale_a=s_M1, scale_b=s_N1, out_dtype=torch.bfloat16)


# ---- Exact BF16 GEMMs: ``lm_head``, and the linears that ``exclude`` names -----------------------
# On a CPU, vLLM packs these weights once after loading, so a later update has no effect, and its GEMM's rounding depends on the
# batch size. This GEMM reads the weight as loaded and is batch-invariant: a row's bits depend on that row alone. The trainer uses
# the same one.

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
