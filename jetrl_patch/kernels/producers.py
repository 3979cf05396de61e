"""Fused producers, which compute and quantize in one kernel: RMSNorm here, SiLU * up in ``silu``.

The RMSNorm values are those of ``exact.norm`` on a GPU (its FP64 formula). Exact squares are summed in FP64, and the root is
FP64 too; only the order of the sum differs, by a few 2^-53. Rounding to FP32 hides the difference unless the exact root is
that close to the midpoint of two FP32 numbers (one row in 10^8).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl_patch.errors import explain
from jetrl_patch.fp8.formats import ScaleFormat, groups
from jetrl_patch.kernels.aot import Spec
from jetrl_patch.kernels.e4m3 import bf16_value, magnitude, quantized, widened
from jetrl_patch.kernels.gemm_common import rounded
from jetrl_patch.kernels.outputs import COMPILER, as_fp8, check_input, new_rows, options
from jetrl_patch.kernels.silu import silu_mul_quantize_rows

__all__ = ["WIDEST", "Normed", "rmsnorm_quantize_rows", "silu_mul_quantize_rows"]

#: the widest row that a program can hold
WIDEST = 16384


@triton.jit
def reciprocal_rms(value, K, EPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """1 / rms of a row of BF16 values [GROUPS, 128], in FP64 and rounded to FP32. The order of its sum follows the layout of
    ``value`` in the compiled kernel, which a test compares between the kernels whose rows must be equal."""
    square = (value * value).to(tl.float64)  # 16 bits: exact
    mean = tl.sum(tl.sum(square, 1), 0) / tl.cast(K, tl.float64)
    return (1.0 / tl.math.sqrt(mean + tl.full([], EPS, tl.float64))).to(tl.float32)


@triton.jit(do_not_specialize=["M", "s_g"])  # one binary for every batch
def rmsnorm_rows_kernel(  # type: ignore[no-untyped-def]
    x, w, q, s, y, rstd, M, K, x_m, s_m, s_g,
    EPS: tl.constexpr, GROUPS: tl.constexpr, KEEP: tl.constexpr, POW2: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """One row per program; GROUPS is a power of two that covers the row. KEEP also stores the BF16 result."""
    m = tl.program_id(0).to(tl.int64)
    g = tl.arange(0, GROUPS)
    k = g[:, None] * 128 + tl.arange(0, 128)[None, :]
    value = widened(tl.load(x + m * x_m + k, mask=k < K, other=0.0), HARDWARE)
    root = reciprocal_rms(value, K, EPS)
    hat = bf16_value(value * root, HARDWARE)
    weight = widened(tl.load(w + k, mask=k < K, other=0.0), HARDWARE)
    tile = bf16_value(weight * hat, HARDWARE)
    codes, scale = quantized(tile, tl.max(magnitude(tile), 1, keep_dims=True), POW2, HARDWARE)
    tl.store(q + m * K + k, codes, mask=k < K)
    tl.store(s + m * s_m + g[:, None] * s_g, scale, mask=(g * 128 < K)[:, None])
    tl.store(rstd + m, root)
    if KEEP:
        tl.store(y + m * K + k, rounded(tile), mask=k < K)


class Normed(NamedTuple):
    """Output of RMSNorm: e4m3 [M, K], FP32 scales [M, G], 1 / rms FP32 [M], and the BF16 result [M, K] if requested."""

    q_MK: Tensor
    s_MG: Tensor
    rstd_M: Tensor
    y_MK: Tensor | None


def rmsnorm_quantize_rows(
    x_MK: Tensor, weight_K: Tensor, eps: float, scale_format: ScaleFormat, keep: bool = False, columns: bool = False
) -> Normed:
    """``quantize_rows(rms_norm(x, weight, eps))``.

    Args:
        x_MK: BF16 with contiguous rows of at most 16384 elements; the row stride is free.
        weight_K: BF16 [K], contiguous.
        keep: also return the BF16 result.
        columns: as for ``quantize_rows``.

    Raises:
        TypeError, ValueError, ConfigError: as ``outputs.check_input``.
    """
    check_input("x", x_MK)
    M, K = x_MK.shape
    check_width(K)
    if (
        weight_K.shape != (K,)
        or weight_K.dtype != torch.bfloat16
        or weight_K.device != x_MK.device
        or not weight_K.is_contiguous()
    ):
        raise ValueError(
            explain(
                "RMSNorm's weight", required=f"contiguous torch.bfloat16 [{K}] on {x_MK.device}",
                found=f"{weight_K.dtype} {list(weight_K.shape)} on {weight_K.device}", fix="convert it first",
            )
        )  # fmt: skip
    fixed, (q, s) = options(x_MK, scale_format), new_rows(x_MK, M, K, columns)
    rstd = torch.empty(M, dtype=torch.float32, device=x_MK.device)
    y = torch.empty_like(x_MK, memory_format=torch.contiguous_format) if keep else None
    if q.numel():
        covering = triton.next_power_of_2(groups(K))
        rmsnorm_rows_kernel[(M,)](
            x_MK, weight_K, q, s, x_MK if y is None else y, rstd, M, K, x_MK.stride(0), *s.stride(),
            EPS=float(eps), GROUPS=covering, KEEP=keep, num_warps=warps_for(covering), **fixed,
        )  # fmt: skip
    return Normed(as_fp8(q), s, rstd, y)


def check_width(K: int) -> None:
    """Raise ValueError for a row that no program can hold."""
    if K > WIDEST:
        fix = "call rms_norm and quantize_rows"
        raise ValueError(explain("RMSNorm in one program", required=f"K up to {WIDEST}", found=K, fix=fix))


def warps_for(covering: int) -> int:
    """Warps per program: 32 elements of a row per thread, within 1 to 16 warps."""
    return min(max(covering * 128 // (32 * 32), 1), 16)


KERNELS = tuple(
    Spec(
        f"rmsnorm_rows{covering * 128}_{scale}", rmsnorm_rows_kernel,
        {"x": "*bf16", "w": "*bf16", "q": "*u8", "s": "*fp32", "y": "*bf16", "rstd": "*fp32"}
        | dict.fromkeys(("M", "K", "x_m", "s_m", "s_g"), "i32"),
        {"EPS": 1e-6, "GROUPS": covering, "KEEP": True, "POW2": scale == "pow2", "HARDWARE": True},
        {"num_warps": warps_for(covering), **COMPILER}, ("K", "x_m"),
    )
    for scale in ("pow2", "fp32")
    for covering in (8, 32, 64, 128)
)  # fmt: skip
