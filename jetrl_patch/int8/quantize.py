"""The reference INT8 quantizer. This code is the contract.

Weights have one scale per output channel and activations one per token; with K last, both are one scale per row.
For a row x:  amax = max |x|;  s = max(amax, 1e-10) / 127 in FP32;  q = clamp(RNE(x / s), -127, 127).
Symmetric: there is no zero point, and -128 is unused. A NaN or Inf in a row makes its scale NaN or Inf and every
result of the row NaN, so it stays visible.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jetrl_patch.fp8.formats import AMAX_FLOOR

__all__ = ["INT8_MAX", "dequantize_rows", "quantize_rows"]

INT8_MAX = 127


def quantize_rows(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize weights [N, K] or activations [M, K] of any float dtype to int8 of the same shape and FP32 scales [rows, 1]."""
    x = x_MK.float()
    scale = x.abs().amax(-1, keepdim=True).clamp(min=AMAX_FLOOR)
    scale = scale / scale.new_full((), INT8_MAX)  # CUDA multiplies by the rounded reciprocal of a number
    # a non-finite value has no integer; the row's scale, also non-finite, keeps it visible
    steps = (x / scale).round().nan_to_num(0.0).clamp(-INT8_MAX, INT8_MAX)
    return steps.to(torch.int8), scale


def dequantize_rows(q_MK: Tensor, scale_M1: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """q * s, [M, K]."""
    return (q_MK.to(torch.float32) * scale_M1).to(dtype)
