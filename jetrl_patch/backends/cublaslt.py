"""cuBLASLt's block-scaled GEMM, with the project's quantizers or with TransformerEngine's."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from jetrl_patch.backends.gpu import GpuBackend, check_widths
from jetrl_patch.backends.quantize import Quantized
from jetrl_patch.backends.transformer_engine import quantize_rows
from jetrl_patch.config.formats import FORMATS, ScaleFormat
from jetrl_patch.kernels.formats import FP8, check_fprop, split_width

# ---- cuBLASLt's block-scaled GEMM through ``torch.nn.functional.scaled_mm`` (CUDA 12.9 or newer, Hopper)
# ``scaled_mm(a [M, K] row-major, b [K, N] column-major)`` with FP32 scales, the outer dimension contiguous:
#
# | recipe  | scale of a               | scale of b                                                               |
# | 1x128   | [M, K/128], strides (1, M) | [N, K/128], strides (1, N)                                             |
# | 128x128 |                          | [L, N/128], strides (1, L), L = K/128 rounded up to 4 (older torch reads past less) |
#
# Counts of groups are rounded up. K and N are multiples of 16, M of 8. ``tests/fp8/scaled_mm_double.py`` has the whole list.
#
# FProp uses 1x128 for the weight too: with scales per row, any slice of rows keeps its scales. cuBLASLt chooses its kernel by
# shape and does not promise independent rows. ``row_equality`` tests that on the machine.

#: ``scaled_mm`` requires a's row count to be a multiple of this
HEIGHT = 8


class CublasLtBackend(GpuBackend):
    """Refuses widths that are not multiples of 16, and pads rows to a multiple of 8."""

    name = "cublaslt"
    columns = True

    def gemm(self, x: Quantized, w: Quantized, out_dtype: torch.dtype, splits: int = 1) -> Tensor:
        check_fprop(x.q, x.s_rows, w.q, w.s_rows, out_dtype)
        K = w.shape[1]
        step, dtype = split_width(K, splits), out_dtype if splits == 1 else torch.float32
        operands = ((x.columns(k, k + step), w.columns(k, k + step)) for k in range(0, K, step))
        return functools.reduce(torch.add, (row_product(a.q, a.s, b.q, b.s, dtype) for a, b in operands)).to(out_dtype)

    def dgrad_product(self, dy: Quantized, w: Quantized, out_dtype: torch.dtype) -> Tensor:
        check_widths(self.name, *w.shape)
        s_LK = _columns(F.pad(w.s, (0, 0, 0, -w.s.shape[0] % 4)))
        return _scaled_mm(dy.q, dy.s, self.transposed(w), s_LK, F.ScalingType.BlockWise128x128, out_dtype)

    def wgrad_product(self, dy: Quantized, x: Quantized, out_dtype: torch.dtype) -> Tensor:
        return row_product(dy.q, dy.s.t(), x.q, x.s.t(), out_dtype)


def row_product(a_MK: Tensor, sa_MG: Tensor, b_NK: Tensor, sb_NG: Tensor, out_dtype: torch.dtype) -> Tensor:
    """a b^T with 1x128 scales on both sides."""
    check_widths(CublasLtBackend.name, a_MK.shape[1], b_NK.shape[0])
    return _scaled_mm(a_MK, sa_MG, b_NK, _columns(sb_NG), F.ScalingType.BlockWise1x128, out_dtype)


def _scaled_mm(a_MK: Tensor, sa_MG: Tensor, b_NK: Tensor, sb: Tensor, recipe_b: F.ScalingType, out_dtype: torch.dtype) -> Tensor:
    M = a_MK.shape[0]
    if a_MK.numel() == 0:  # no rows, or no tokens to sum over
        return a_MK.new_zeros(M, b_NK.shape[0], dtype=out_dtype)
    if M % HEIGHT:
        a_MK = F.pad(a_MK.view(torch.uint8), (0, 0, 0, -M % HEIGHT)).view(FP8)
        sa_MG = F.pad(sa_MG, (0, 0, 0, -M % HEIGHT))
    recipe = F.ScalingType.BlockWise1x128
    y = F.scaled_mm(a_MK, b_NK.t(), _columns(sa_MG), recipe, sb, recipe_b, output_dtype=out_dtype)
    return y[:M]


def _columns(s: Tensor) -> Tensor:
    """The scales [R, G] with strides (1, R), copied if they have others, even if G is 1, where torch ignores strides."""
    return s if s.stride() == (1, s.shape[0]) else s.new_empty(s.shape[1], s.shape[0]).t().copy_(s)


# ---- The rollout's counterpart of TransformerEngine's layers: TransformerEngine's quantizer and cuBLASLt
# The trainer keeps TransformerEngine's own layers, whose GEMM for ``Float8BlockScaling`` is cuBLASLt's with block scales. The
# rollout uses this backend under the same name, so both sides report equal settings. With power-of-two scales, this project's
# quantizers give the same bytes. With FP32 scales, this backend calls TransformerEngine's quantizer.

class TeBackend(CublasLtBackend):
    """For the rollout only; ``swap_linears`` refuses it for ``nn.Linear``."""

    name = "te"

    def quantize_activation(self, x_MK: Tensor, scale_format: ScaleFormat) -> Quantized:
        if not FORMATS[scale_format].powers_of_two and x_MK.shape[0]:
            return quantize_rows(x_MK, scale_format)
        return super().quantize_activation(x_MK, scale_format)
