"""What a producer in the rollout hands to the FP8 linear behind it: bytes and scales, in the place of a BF16 tensor.

| operation                     | one launch reads                     | and writes                                  |
| the residual's sum, RMSNorm   | x, residual BF16 [M, K], w [K]       | the sum BF16 [M, K], q e4m3 [M, K], s [M, G] |
| SiLU(gate) * up               | gate and up side by side, BF16 [M, 2K] | q e4m3 [M, K], s [M, G]                    |

The bytes are those that the linear would have made of the BF16 result, which is never written: nothing else reads it. Nothing
is saved for a backward pass (``fp8.producers`` is the trainer's). In a compiled graph each is one opaque operator, so a
compiler neither changes a rounding nor sees a library call.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor

from jetrl_patch.fp8.backends import Backend, get_backend
from jetrl_patch.fp8.backends.gpu import GpuBackend
from jetrl_patch.fp8.formats import FP8, ScaleFormat, groups

__all__ = ["Rows", "fits", "multiplied", "normed", "product"]

#: the compiler spreads rows over threads as in ``kernels.norm`` if their width is a multiple of this (``kernels.norm_rows``)
ALIGN = 16


class Rows(NamedTuple):
    """A quantized activation: e4m3 [M, K], and FP32 scales [M, G] in the backend's layout."""

    q_MK: Tensor
    s_MG: Tensor


def fits(backend: GpuBackend, like: Tensor, width: int) -> bool:
    """Whether the kernels of both producers run for rows of this width on the device of ``like``."""
    kernels = backend.producers(like)
    return kernels is not None and width <= kernels.WIDEST and not width % ALIGN


def normed(
    x_MK: Tensor, residual_MK: Tensor | None, weight_K: Tensor, eps: float, backend: GpuBackend, scale_format: ScaleFormat
) -> tuple[Rows, Tensor | None]:
    """The quantized RMSNorm of x + residual, all BF16, and the sum; without a residual that of x, and None."""
    if torch.compiler.is_compiling():
        q_MK, s_MG, total_MK = _normed(x_MK, residual_MK, weight_K, eps, backend.name, scale_format)
        return Rows(q_MK, s_MG), None if residual_MK is None else total_MK
    q_MK, s_MG, total = backend.norm_rows(x_MK, residual_MK, weight_K, eps, scale_format)
    return Rows(q_MK, s_MG), total


def multiplied(both_MF: Tensor, backend: GpuBackend, scale_format: ScaleFormat) -> Rows:
    """The quantized SiLU(gate) * up of gate and up [M, K] side by side in BF16 [M, 2K]."""
    if torch.compiler.is_compiling():
        return Rows(*_multiplied(both_MF, backend.name, scale_format))
    gate_MK, up_MK = both_MF.chunk(2, 1)
    return Rows(*backend.silu_mul_rows(gate_MK, up_MK, scale_format))


def product(
    rows: Rows, w_NK: Tensor, s_NG: Tensor, backend: Backend, out_dtype: torch.dtype, s_blocks: Tensor | None = None
) -> Tensor:
    """``Backend.gemm`` [M, N] of rows and a weight."""
    if torch.compiler.is_compiling():
        return _product(*rows, w_NK, s_NG, backend.name, out_dtype, s_blocks)
    return backend.gemm(*rows, w_NK, s_NG, out_dtype, s_blocks=s_blocks)


def _gpu(name: str) -> GpuBackend:
    return cast(GpuBackend, get_backend(name))


def _new_rows(x: Tensor, K: int, backend: str) -> tuple[Tensor, Tensor]:
    """Of a graph, as ``kernels.outputs.new_rows`` makes them."""
    M, G = x.shape[0], groups(K)
    q_MK = x.new_empty(M, K, dtype=FP8)
    if _gpu(backend).columns:
        return q_MK, x.new_empty(G, -(-M // 4) * 4, dtype=torch.float32)[:, :M].t()
    return q_MK, x.new_empty(M, G, dtype=torch.float32)


@torch.library.custom_op("jetrl_patch::norm_rows", mutates_args=())
def _normed(
    x_MK: Tensor, residual_MK: Tensor | None, weight_K: Tensor, eps: float, backend: str, scale_format: str
) -> tuple[Tensor, Tensor, Tensor]:
    q, s, total = _gpu(backend).norm_rows(x_MK, residual_MK, weight_K, eps, cast(ScaleFormat, scale_format))
    return q, s, x_MK.new_empty(0) if total is None else total  # an operator cannot return None


@_normed.register_fake
def _(
    x_MK: Tensor, residual_MK: Tensor | None, weight_K: Tensor, eps: float, backend: str, scale_format: str
) -> tuple[Tensor, Tensor, Tensor]:
    total = x_MK.new_empty(0) if residual_MK is None else x_MK.new_empty(x_MK.shape)
    return *_new_rows(x_MK, x_MK.shape[1], backend), total


@torch.library.custom_op("jetrl_patch::silu_mul_rows", mutates_args=())
def _multiplied(both_MF: Tensor, backend: str, scale_format: str) -> tuple[Tensor, Tensor]:
    return tuple(multiplied(both_MF, _gpu(backend), cast(ScaleFormat, scale_format)))


@_multiplied.register_fake
def _(both_MF: Tensor, backend: str, scale_format: str) -> tuple[Tensor, Tensor]:
    return _new_rows(both_MF, both_MF.shape[1] // 2, backend)


@torch.library.custom_op("jetrl_patch::fp8_rows_product", mutates_args=())
def _product(
    q_MK: Tensor,
    s_MG: Tensor,
    w_NK: Tensor,
    s_NG: Tensor,
    backend: str,
    out_dtype: torch.dtype,
    s_blocks: Tensor | None,
) -> Tensor:
    return get_backend(backend).gemm(q_MK, s_MG, w_NK, s_NG, out_dtype, s_blocks=s_blocks)


@_product.register_fake
def _(
    q_MK: Tensor,
    s_MG: Tensor,
    w_NK: Tensor,
    s_NG: Tensor,
    backend: str,
    out_dtype: torch.dtype,
    s_blocks: Tensor | None,
) -> Tensor:
    return q_MK.new_empty(q_MK.shape[0], w_NK.shape[0], dtype=out_dtype)
