"""FProp of MXFP8 operands with the block-scaled tensor cores of Blackwell. Compiled for compute capability 10.0, not yet run."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl_patch.config.formats import FORMATS
from jetrl_patch.kernels.formats import check_fprop, exponents, groups
from jetrl_patch.kernels.gemm_common import PINNED, converted

# ---- FProp: Y [M, N] = round(sum over k of (qX * sX) * (qW * sW)), in FP32 inside the tensor cores, K ascending by DEPTH
#     X e4m3 [M, K] row-major, E8M0 [M, G];  W e4m3 [N, K] row-major, E8M0 [N, G];  Y [M, N];  G = ceil(K / 32)
#
# A row's bits depend only on that row: there is one tile, the order of K is fixed, and no two programs share a sum. An engine
# tests this before it serves (``backends.row_equality``).

BLOCK = FORMATS["mxfp8"].block
ROWS, COLUMNS, DEPTH = 128, 128, 128
WARPS, STAGES = 8, 3


@triton.jit(do_not_specialize=["M"])  # one binary for every batch
def fprop_mx_kernel(  # type: ignore[no-untyped-def]
    x, w, sx, sw, y, M, N, K, G, x_m, w_n,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Scales are uint8, contiguous."""
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    k, g = tl.arange(0, DEPTH), tl.arange(0, DEPTH // 32)
    x_at, w_at = x + m.to(tl.int64)[:, None] * x_m, w + n.to(tl.int64)[:, None] * w_n
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in tl.range(0, K, DEPTH):
        inside, scaled = start + k < K, start // 32 + g < G
        x_tile = tl.load(x_at + start + k[None, :], mask=(m < M)[:, None] & inside[None, :], other=0.0)
        w_tile = tl.load(w_at + start + k[None, :], mask=(n < N)[:, None] & inside[None, :], other=0.0)
        # 127 is 2^0: outside of the matrices there are zeros
        at = start // 32 + g[None, :]
        x_scale = tl.load(sx + m[:, None] * G + at, mask=(m < M)[:, None] & scaled[None, :], other=127)
        w_scale = tl.load(sw + n[:, None] * G + at, mask=(n < N)[:, None] & scaled[None, :], other=127)
        acc = tl.dot_scaled(x_tile, x_scale, "e4m3", w_tile.T, w_scale, "e4m3", acc)
    at = y + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(at, converted(acc, y), mask=(m < M)[:, None] & (n < N)[None, :])


def fprop(q_MK: Tensor, s_MG: Tensor, w_NK: Tensor, s_NG: Tensor, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Y [M, N] in BF16 or FP32 from MXFP8 operands with FP32 scales, each a power of two."""
    check_fprop(q_MK, s_MG, w_NK, s_NG, out_dtype, block=BLOCK)
    (M, K), N = q_MK.shape, w_NK.shape[0]
    y = torch.empty(M, N, dtype=out_dtype, device=q_MK.device)
    if y.numel():
        x, w = (t if t.stride(1) == 1 else t.contiguous() for t in (q_MK, w_NK))
        grid = (-(-M // ROWS), -(-N // COLUMNS))
        fprop_mx_kernel[grid](
            x, w, exponents(s_MG), exponents(s_NG), y, M, N, K, groups(K, BLOCK), x.stride(0), w.stride(0),
            ROWS=ROWS, COLUMNS=COLUMNS, DEPTH=DEPTH, num_warps=WARPS, num_stages=STAGES,
            **PINNED,
        )  # fmt: skip
    return y
