"""RMSNorm, fused with the quantization of its result, and its gradient. Raises what ``common.check_input`` raises."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl_patch.config.formats import ScaleFormat
from jetrl_patch.errors import ModelError, explain
from jetrl_patch.kernels.common import (
    bf16_value,
    check_input,
    load_tile,
    magnitude,
    new_rows,
    options,
    quantized,
    widened,
)
from jetrl_patch.kernels.formats import BLOCK, FP8, groups
from jetrl_patch.kernels.gemm_common import PINNED, check_device, converted, programs, rounded
from jetrl_patch.kernels.silu import silu_mul_quantize_rows

__all__ = ["WIDEST", "norm_quantize_rows", "silu_mul_quantize_rows"]


# ---- RMSNorm: y = bf16(w * bf16(x / rms(x)))
# The values are those of the FP64 formula in ``exact.elementwise``: exact squares, summed in FP64, and an FP64 root. Only the
# order of the sum differs, which changes it by a few 2^-53. Rounding to FP32 hides this unless the exact root is that close to
# the midpoint of two FP32 numbers (one row in 10^8).

#: maximum width of a row, which one program holds
WIDEST = 16384


@triton.jit
def reciprocal_rms(value, K, EPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """1 / rms of a row of BF16 values [GROUPS, 128], computed in FP64 and rounded to FP32.

    The order of the sum follows from the layout of ``value`` in the compiled kernel. A test compares the layouts of the kernels
    that must give equal rows.
    """
    square = (value * value).to(tl.float64)  # 16 bits: exact
    mean = tl.sum(tl.sum(square, 1), 0) / tl.cast(K, tl.float64)
    return (1.0 / tl.math.sqrt(mean + tl.full([], EPS, tl.float64))).to(tl.float32)


def _prepared(
    x_MK: Tensor, weight_K: Tensor, eps: float, scale_format: ScaleFormat, columns: bool
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Check x and the weight. Returns the tensors for bytes and scales, and the constants and options of the kernels."""
    check_input("x", x_MK)
    (M, K), device = x_MK.shape, x_MK.device
    if K > WIDEST:
        fix = "call rms_norm and quantize_rows"
        raise ValueError(explain("RMSNorm in one program", required=f"K up to {WIDEST}", found=K, fix=fix))
    right = weight_K.shape == (K,) and weight_K.dtype == torch.bfloat16 and weight_K.device == device
    if not right or not weight_K.is_contiguous():
        required = f"contiguous torch.bfloat16 [{K}] on {device}"
        found = f"{weight_K.dtype} {list(weight_K.shape)} on {weight_K.device}"
        raise ValueError(explain("RMSNorm's weight", required=required, found=found, fix="convert it first"))
    covering = triton.next_power_of_2(groups(K))
    fixed = {"EPS": float(eps), "GROUPS": covering, "num_warps": warps_for(covering), **options(scale_format)}
    return *new_rows(x_MK, M, K, columns), fixed


def warps_for(covering: int) -> int:
    """Warps per program: 32 elements of a row per thread, within 1 to 16 warps."""
    return min(max(covering * 128 // (32 * 32), 1), 16)


# ---- RMSNorm in the rounding order of Hugging Face models, one row per program: y = bf16(w * bf16(x / rms(x)))
# A program holds its whole row, so the order of the sum depends only on the width. Squares of BF16 values are exact, and their
# sum and root are FP64. The values equal those of the kernels that also quantize.

@triton.jit
def rms_norm_kernel(  # type: ignore[no-untyped-def]
    x, w, y, rstd, K, x_m, EPS: tl.constexpr, GROUPS: tl.constexpr, ONE_PLUS: tl.constexpr, HARDWARE: tl.constexpr
):
    """GROUPS is a power of two; GROUPS * 128 is at least K. With ONE_PLUS, y = bf16((1 + w) * (x / rms(x)))."""
    m = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, GROUPS)[:, None] * 128 + tl.arange(0, 128)[None, :]
    value = widened(tl.load(x + m * x_m + k, mask=k < K, other=0.0), HARDWARE)
    root = reciprocal_rms(value, K, EPS)
    weight = widened(tl.load(w + k, mask=k < K, other=0.0), HARDWARE)
    result = (1.0 + weight) * (value * root) if ONE_PLUS else weight * bf16_value(value * root, HARDWARE)
    tl.store(y + m * K + k, rounded(result), mask=k < K)
    tl.store(rstd + m, root)


def rms_norm(x_MK: Tensor, weight_K: Tensor, eps: float, one_plus: bool = False) -> tuple[Tensor, Tensor]:
    """Return y BF16 [M, K] and 1/rms FP32 [M]. Inputs are BF16; x may have any row stride.

    Raises ModelError if a row is wider than one program can hold.
    """
    M, K = x_MK.shape
    if K > WIDEST:
        required = f"RMSNorm up to width {WIDEST}"
        raise ModelError(explain("align='exact' on CUDA", required=required, found=K, fix="use align='linear'"))
    x_MK = x_MK if x_MK.stride(1) == 1 else x_MK.contiguous()
    check_device(x_MK, weight_K)
    y = torch.empty(M, K, dtype=torch.bfloat16, device=x_MK.device)
    rstd = torch.empty(M, dtype=torch.float32, device=x_MK.device)
    if M:
        covering = triton.next_power_of_2(groups(K))
        rms_norm_kernel[(M,)](
            x_MK, weight_K.contiguous(), y, rstd, K, x_MK.stride(0), EPS=float(eps), GROUPS=covering, ONE_PLUS=one_plus,
            HARDWARE=not triton.knobs.runtime.interpret, num_warps=warps_for(covering), **PINNED,
        )  # fmt: skip
    return y, rstd


# ---- RMSNorm, and the quantization of its result for the next FP8 linear, in one launch
#     total = bf16(x + residual);   y = bf16(w * bf16(total / rms(total)));   q, s = quantize_rows(y)
#
# The rollout adds the residual and keeps no y. The trainer keeps y, and 1 / rms for the backward pass.
#
# The rows are bit-equal to ``rms_norm`` and ``quantize_rows``. The only sum is that of the squares, and its order follows from
# how the compiler spreads a tile over threads. In ``rms_norm`` a thread gets 8 elements of BF16, which are 16 bytes. In a kernel
# whose tile also stores FP8 bytes, it would get 16 elements. So this kernel reads the row twice, the second time from the cache
# and as a tile of another shape. That leaves the sum spread as in ``rms_norm``. A test compares the compiled kernels.

@triton.jit(do_not_specialize=["s_g"])  # one binary for every batch
def norm_rows_kernel(  # type: ignore[no-untyped-def]
    x, residual, w, q, s, total, y, rstd, K, x_m, r_m, s_m, s_g,
    EPS: tl.constexpr, GROUPS: tl.constexpr, ADD: tl.constexpr, KEEP: tl.constexpr, POW2: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """One row per program. GROUPS is a power of two, at least K / 128. Without ADD there is no residual and no total.

    KEEP stores ``y`` and ``rstd``.
    """
    m = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, GROUPS)[:, None] * 128 + tl.arange(0, 128)[None, :]
    value = widened(tl.load(x + m * x_m + k, mask=k < K, other=0.0), HARDWARE)
    source = x + m * x_m
    if ADD:
        value = bf16_value(value + widened(tl.load(residual + m * r_m + k, mask=k < K, other=0.0), HARDWARE), HARDWARE)
        source = total + m * K
        tl.store(source + k, rounded(value), mask=k < K)
    root = reciprocal_rms(value, K, EPS)
    tl.debug_barrier()  # other threads read the total below
    g = tl.arange(0, GROUPS)[:, None, None]
    k = g * 128 + tl.arange(0, 128)[None, None, :]
    again = widened(tl.load(source + k, mask=k < K, other=0.0), HARDWARE)
    weight = widened(tl.load(w + k, mask=k < K, other=0.0), HARDWARE)
    tile = bf16_value(weight * bf16_value(again * root, HARDWARE), HARDWARE)
    codes, scale = quantized(tile, tl.max(magnitude(tile), 2, keep_dims=True), POW2, HARDWARE)
    tl.store(q + m * K + k, codes, mask=k < K)
    tl.store(s + m * s_m + g * s_g, scale, mask=g * 128 < K)
    if KEEP:
        tl.store(y + m * K + k, rounded(tile), mask=k < K)
        tl.store(rstd + m, root)


class NormedRows(NamedTuple):
    """e4m3 [M, K], FP32 scales [M, G], and the BF16 sum [M, K], which is None without a residual.

    Only if requested: the result BF16 [M, K], and 1 / rms FP32 [M].
    """

    q_MK: Tensor
    s_MG: Tensor
    total_MK: Tensor | None
    y_MK: Tensor | None = None
    rstd_M: Tensor | None = None


def norm_quantize_rows(
    x_MK: Tensor, residual_MK: Tensor | None, weight_K: Tensor, eps: float, scale_format: ScaleFormat, columns: bool = False,
    keep: bool = False,
) -> NormedRows:  # fmt: skip
    """``quantize_rows(rms_norm(x + residual, weight, eps))``, and the sum.

    Args:
        x_MK, residual_MK: BF16 with contiguous rows of at most 16384 elements; any row stride.
        weight_K: BF16 [K], contiguous.
        columns: as for ``quantize_rows``.
        keep: also return the result and 1 / rms.
    """
    (M, K), (q, s, fixed) = x_MK.shape, _prepared(x_MK, weight_K, eps, scale_format, columns)
    add, other = residual_MK is not None, x_MK if residual_MK is None else residual_MK
    if residual_MK is not None:
        check_input("residual", residual_MK)
        check_device(x_MK, residual_MK)
        if residual_MK.shape != (M, K):
            fix, found = "pass it in the shape of x", list(residual_MK.shape)
            raise ValueError(explain("RMSNorm's residual", required=f"shape [{M}, {K}]", found=found, fix=fix))
    total, y = (torch.empty_like(x_MK, memory_format=torch.contiguous_format) if wanted else None for wanted in (add, keep))
    rstd = torch.empty(M, dtype=torch.float32, device=x_MK.device) if keep else None
    if q.numel():
        unwritten = (x_MK if t is None else t for t in (total, y, rstd))
        norm_rows_kernel[(M,)](
            x_MK, other, weight_K, q, s, *unwritten, K, x_MK.stride(0), other.stride(0), *s.stride(), ADD=add, KEEP=keep, **fixed
        )
    return NormedRows(q.view(FP8), s, total, y, rstd)


# ---- The gradients of RMSNorm in one pass over its rows ---------------------------------------------
# Reading x and dy and writing dx moves 6 bytes per element.
#
#     h = x * rstd      dx = rstd * (w * dy - h * mean(w * dy * h))      dw = sum over rows of dy * h
#
# torch's operations move 94 bytes per element. A program loops over rows at a fixed stride and keeps the sums of dw for all
# columns in registers. At the end it writes them as one row of FP32, and torch adds up the rows of all programs. There are at
# most an eighth as many programs as tiles, so those rows add at most one byte per element. The order of the sums is fixed: the
# same batch gives the same bits.
#
# Another launch quantizes dx, which reads 2 bytes per element and writes 2. WGrad's layout needs 128 rows at a time, more than a
# program can hold when rows have thousands of elements, and reading x and dy again for it would cost 4 bytes.

#: minimum number of elements of a tile
SPAN = 2048
#: warps that fit on an SM with the registers that a tile needs
ACTIVE = 32
#: minimum number of tiles per program, if there are enough
TILES = 8


class Shape(NamedTuple):
    """A tile's rows and columns, and its warps."""

    rows: int
    width: int
    warps: int


def shape_for(K: int) -> Shape:
    """A tile of whole rows: one, or several short ones."""
    width = max(BLOCK, triton.next_power_of_2(K))
    rows = max(1, SPAN // width)
    per_thread = 16 if width > 8192 else 8  # a program has at most 1024 threads
    return Shape(rows, width, rows * width // (per_thread * 32))


@triton.jit(do_not_specialize=["M", "programs"])  # one binary for every batch
def rms_norm_backward_kernel(  # type: ignore[no-untyped-def]
    x, w, rstd, dy, dx, dw, M, K, x_m, dy_m, programs,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, WEIGHT: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """dx is contiguous. With WEIGHT, a program stores its sums in its row of ``dw`` [programs, K]."""
    k = tl.arange(0, WIDTH)
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, ROWS), programs):
        m = tile * ROWS + tl.arange(0, ROWS)
        root = tl.load(rstd + m, mask=m < M, other=0.0)[:, None]
        hat = load_tile(x, m, k, M, K, x_m, HARDWARE) * root
        g = load_tile(dy, m, k, M, K, dy_m, HARDWARE)
        if WEIGHT:
            total += g * hat
        weight = widened(tl.load(w + k, mask=k < K, other=0.0), HARDWARE)  # stays in the L1 cache; registers are scarcer
        weighted = g * weight[None, :]
        mean = tl.sum(weighted * hat, 1)[:, None] / tl.cast(K, tl.float32)
        found = (weighted - hat * mean) * root
        at = dx + m.to(tl.int64)[:, None] * K + k[None, :]
        tl.store(at, converted(found, dx), mask=(m < M)[:, None] & (k < K)[None, :])
    if WEIGHT:
        tl.store(dw + tl.program_id(0).to(tl.int64) * K + k, tl.sum(total, 0), mask=k < K)


def rms_norm_backward(
    x_MK: Tensor, weight_K: Tensor, rstd_M: Tensor, dy_MK: Tensor, dtype: torch.dtype, wants_weight: bool
) -> tuple[Tensor, Tensor | None]:
    """dx [M, K] in ``dtype`` (BF16 or FP32), and dw FP32 [K] if requested.

    Args:
        x_MK: BF16, as the forward pass read it, with any row stride.
        weight_K: what the forward pass multiplied by, BF16 or FP32.
        rstd_M: 1 / rms FP32 [M], which the forward pass returned.
        dy_MK: the gradient of the result, BF16 or FP32.
    """
    x_MK, dy_MK = (t if t.stride(1) == 1 else t.contiguous() for t in (x_MK, dy_MK))
    check_device(x_MK, weight_K, rstd_M, dy_MK)
    M, K = x_MK.shape
    shape = shape_for(K)
    tiles = -(-M // shape.rows)
    grid = programs(x_MK.device, max(tiles // TILES, min(tiles, 1)), ACTIVE // shape.warps)
    dx = torch.empty(M, K, dtype=dtype, device=x_MK.device)
    parts = torch.empty(grid[0], K, dtype=torch.float32, device=x_MK.device) if wants_weight else rstd_M
    if M:
        rms_norm_backward_kernel[grid](
            x_MK, weight_K.contiguous(), rstd_M, dy_MK, dx, parts, M, K, x_MK.stride(0), dy_MK.stride(0), grid[0],
            ROWS=shape.rows, WIDTH=shape.width, WEIGHT=wants_weight,
            HARDWARE=not triton.knobs.runtime.interpret, num_warps=shape.warps, **PINNED,
        )  # fmt: skip
    return dx, parts.sum(0) if wants_weight else None
