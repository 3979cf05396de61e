"""FP8 with one scale per output channel and per token: a rollout format, as an alternative to 128-blocks.

For a row x:  s = max(amax, 1e-10) / 448 in FP32 (rounded up to a power of two in scale format "pow2");
q = RNE-saturate(x / s) to e4m3fn. The product is the block product with scales that are constant along K, so every
GEMM backend computes it unchanged:  Y = round(Σ_kb fma(dot128(qX, qW), sX · sW, acc)).
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from jetrl_patch.fp8.backends import get_backend
from jetrl_patch.fp8.backends.base import Backend
from jetrl_patch.fp8.formats import FP8, FP8_MAX, ScaleFormat, groups
from jetrl_patch.fp8.quantize import scale_from_amax

__all__ = ["fprop", "quantize_rows"]


def quantize_rows(x_MK: Tensor, scale_format: ScaleFormat) -> tuple[Tensor, Tensor]:
    """Quantize weights [N, K] or activations [M, K] to e4m3fn of the same shape and FP32 scales [rows, 1]."""
    x = x_MK.float()
    scale_M1 = scale_from_amax(x.abs().amax(-1, keepdim=True), scale_format)
    return (x / scale_M1).clamp(-FP8_MAX, FP8_MAX).to(FP8), scale_M1


def fprop(
    backend: Backend,
    x_MK: Tensor,
    w_NK: Tensor,
    s_N1: Tensor,
    scale_format: ScaleFormat,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Quantize a BF16 activation per token and multiply. Returns [M, N] in BF16 or FP32 (an unrounded partial sum).

    In a compiled graph it is one opaque operator, because the libraries behind a backend cannot be traced.
    """
    if torch.compiler.is_compiling():
        return _fprop(x_MK, w_NK, s_N1, backend.name, scale_format, out_dtype)
    q_MK, s_M1 = quantize_rows(x_MK, scale_format)
    G = groups(x_MK.shape[1])
    return backend.gemm(q_MK, _along_K(s_M1, G), w_NK, _along_K(s_N1, G), out_dtype)


def _along_K(scale: Tensor, G: int) -> Tensor:
    return scale.expand(-1, G).contiguous()


@torch.library.custom_op("jetrl_patch::fp8_channel_fprop", mutates_args=())
def _fprop(x_MK: Tensor, w_NK: Tensor, s_N1: Tensor, backend: str, scale_format: str, out_dtype: torch.dtype) -> Tensor:
    return fprop(get_backend(backend), x_MK, w_NK, s_N1, cast(ScaleFormat, scale_format), out_dtype)


@_fprop.register_fake
def _(x_MK: Tensor, w_NK: Tensor, s_N1: Tensor, backend: str, scale_format: str, out_dtype: torch.dtype) -> Tensor:
    return x_MK.new_empty(x_MK.shape[0], w_NK.shape[0], dtype=out_dtype)
