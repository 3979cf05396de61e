"""The gradients of RMSNorm in one pass over its rows: x and dy are read, dx is written, 6 bytes an element of memory. With the
gradient of the residual, which is added to dx, they are 8.

    h = x * rstd      dx = rstd * (w * dy - h * mean(w * dy * h))      dw = sum over rows of dy * h

In torch's operations the same takes 94 bytes an element. A program walks over rows with a fixed stride and keeps the sums of
dw for all columns in registers; at the end it writes them as one row of FP32, and torch adds up the programs' rows. There are
at most an eighth as many programs as tiles, so those rows add no more than a byte an element. The sums have a fixed order: the
same batch gives the same bits.

The FP8 layouts of dx are left to a launch of their own, which reads 2 bytes an element and writes 2. That for WGrad needs 128
rows at a time: with rows of thousands of elements no program holds them, and to read x and dy again for it would be 4 bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl_patch.fp8.formats import BLOCK
from jetrl_patch.kernels.aot import Spec
from jetrl_patch.kernels.e4m3 import bf16_value, widened
from jetrl_patch.kernels.gemm_common import PINNED, check_device, converted, programs
from jetrl_patch.kernels.tiles import load_tile

#: elements of a tile, at least
SPAN = 2048
#: warps that an SM holds with the registers that a tile needs
ACTIVE = 32
#: tiles of a program, at least, where there are enough
TILES = 8


class Shape(NamedTuple):
    """A tile's rows and columns, and its warps."""

    rows: int
    width: int
    warps: int


def shape_for(K: int) -> Shape:
    """Whole rows, several of them if they are short."""
    width = max(BLOCK, triton.next_power_of_2(K))
    rows = max(1, SPAN // width)
    per_thread = 16 if width > 8192 else 8  # a program has at most 1024 threads
    return Shape(rows, width, rows * width // (per_thread * 32))


@triton.jit(do_not_specialize=["M", "programs"])  # one binary for every batch
def rms_norm_backward_kernel(  # type: ignore[no-untyped-def]
    x, w, rstd, dy, other, dx, dw, M, K, x_m, dy_m, other_m, programs,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, WEIGHT: tl.constexpr, ADD: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """dx is contiguous. With WEIGHT, a program stores its sums in its row of ``dw`` [programs, K]; with ADD, dx is BF16."""
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
        if ADD:  # rounded before it and after, as autograd adds two gradients
            found = bf16_value(found, HARDWARE) + load_tile(other, m, k, M, K, other_m, HARDWARE)
        at = dx + m.to(tl.int64)[:, None] * K + k[None, :]
        tl.store(at, converted(found, dx), mask=(m < M)[:, None] & (k < K)[None, :])
    if WEIGHT:
        tl.store(dw + tl.program_id(0).to(tl.int64) * K + k, tl.sum(total, 0), mask=k < K)


def rms_norm_backward(
    x_MK: Tensor, weight_K: Tensor, rstd_M: Tensor, dy_MK: Tensor, dtype: torch.dtype, wants_weight: bool,
    other_MK: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """dx [M, K] in ``dtype`` (BF16 or FP32), and dw FP32 [K] if requested.

    Args:
        x_MK, weight_K: BF16, as the forward pass read them; x may have any row stride.
        rstd_M: 1 / rms FP32 [M], which the forward pass returned.
        dy_MK: the gradient of the result, BF16 or FP32.
        other_MK: the gradient of x from elsewhere, BF16, added to a dx in BF16.
    """
    given = (t for t in (x_MK, dy_MK, other_MK) if t is not None)
    x_MK, dy_MK, *others = (t if t.stride(1) == 1 else t.contiguous() for t in given)
    other = others[0] if others else x_MK  # not read then
    check_device(x_MK, weight_K, rstd_M, dy_MK, other)
    M, K = x_MK.shape
    shape = shape_for(K)
    tiles = -(-M // shape.rows)
    grid = programs(x_MK.device, max(tiles // TILES, min(tiles, 1)), ACTIVE // shape.warps)
    dx = torch.empty(M, K, dtype=dtype, device=x_MK.device)
    parts = torch.empty(grid[0], K, dtype=torch.float32, device=x_MK.device) if wants_weight else rstd_M
    if M:
        rms_norm_backward_kernel[grid](
            x_MK, weight_K.contiguous(), rstd_M, dy_MK, other, dx, parts, M, K,
            x_MK.stride(0), dy_MK.stride(0), other.stride(0), grid[0],
            ROWS=shape.rows, WIDTH=shape.width, WEIGHT=wants_weight, ADD=bool(others),
            HARDWARE=not triton.knobs.runtime.interpret, num_warps=shape.warps, **PINNED,
        )  # fmt: skip
    return dx, parts.sum(0) if wants_weight else None


def _spec(width: int, add: bool) -> Spec:
    shape = shape_for(width)
    return Spec(
        f"rms_norm_backward{width}{'_added' * add}", rms_norm_backward_kernel,
        dict.fromkeys(("x", "w", "dy", "other", "dx"), "*bf16") | dict.fromkeys(("rstd", "dw"), "*fp32")
        | dict.fromkeys(("M", "K", "x_m", "dy_m", "other_m", "programs"), "i32"),
        {"ROWS": shape.rows, "WIDTH": shape.width, "WEIGHT": True, "ADD": add, "HARDWARE": True},
        {"num_warps": shape.warps, **PINNED}, ("K", "x_m", "dy_m", "other_m"),
    )  # fmt: skip


KERNELS = tuple(_spec(width, add) for add in (False, True) for width in (128, 1024, 2048, 4096, 8192, 16384))
