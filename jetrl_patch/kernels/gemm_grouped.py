"""The kernels of a mixture's experts. Each computes all experts in one launch.

| kernel            | in                                     | out                                   |
| plan              | experts of each token                  | the sorted pairs                      |
| grouped           | rows, a stack of matrices              | FProp; with transposed matrices, DGrad    |
| silu_mul_quantize | gate and up of each pair               | their product in FP8                  |
| combine           | an output for each pair, weights       | a row for each token                  |
| pair_backward     | gradients of a pair's output           | those of gate, up and its weight      |
| group_tokens, ... | gradients and saved rows of each pair  | WGrad's operands, grouped by expert   |
| grouped_wgrad     | these                                  | dW [E, N, K]                          |
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl_patch.config.formats import ScaleFormat
from jetrl_patch.kernels.common import bf16_value, decode, new_tokens, options, store_tokens, widened
from jetrl_patch.kernels.formats import BLOCK, FP8, check_operand, groups
from jetrl_patch.kernels.gemm_backward import SIDE, STAGES, WGRAD_WARPS, transposed
from jetrl_patch.kernels.gemm_common import (
    PINNED,
    Tile,
    check_device,
    converted,
    descriptor,
    new_output,
    place,
    programs,
)
from jetrl_patch.kernels.mixture import ROWS, Plan, combine, pair_backward, plan
from jetrl_patch.kernels.quantize import quantize_rows
from jetrl_patch.kernels.silu import silu_mul_quantize_rows

__all__ = [
    "Plan", "block_view", "combine", "group_tokens", "grouped", "grouped_wgrad", "pair_backward", "plan", "quantize_rows",
    "regroup", "silu_mul_quantize_rows", "transposed",
]  # fmt: skip


# ---- FProp and DGrad of all experts in one launch: each position's row times the matrices of its expert
#     X e4m3 [R, K], s [R, G];  W e4m3 [S, N, K], s per block [S, ceil(N / 128), G];  Y [P, columns];  G = ceil(K / 128)
#
# An expert has one matrix of the stack or two (S = E or 2E), gate and up:
#
#     side by side   Y [P, 2N] = (x Wg^T, x Wu^T)             FProp of gate and up
#     summed         Y [P, N]  = x1 Wg^T + x2 Wu^T            their DGrad: W is transposed, and X [P, 2K] holds both gradients
#
# A row of X is a position of the ``Plan``, or the token at that position, which the kernel looks up without copying a row. A
# position's sum is that of ``gemm.fprop`` for the same row: the same instruction, K ascending in blocks of 128, one ``fma`` per
# block with sX * sW. All batches use the same tile, so a row's bits depend only on its own bytes and its expert, not on the
# number of tokens of that expert or the row's position among them.

TILE = Tile(rows=ROWS, columns=128, warps=4, stages=4, per_sm=2)
#: rows of tiles per band; see ``place``
HEIGHT = 8


@triton.jit(do_not_specialize=["E", "sx_g", "programs"])  # one binary for every batch
def grouped_kernel(  # type: ignore[no-untyped-def]
    x, w_SNK, sx, sw, y, order, tiles, tile_first, E, N, K, k, x_r, sx_r, sx_g, sw_s, sw_n, sw_g, programs,
    TOKENS: tl.constexpr, BESIDE: tl.constexpr, SUMMED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, HEIGHT: tl.constexpr,
):  # fmt: skip
    """``w_SNK`` is a TMA descriptor of [S * N, K] with boxes of COLUMNS x 128. TOKENS: a row of x is a token, not a position.

    If a box reaches into the next matrix, those columns are not stored.
    """
    G = tl.cdiv(K, 128)
    wide = tl.cdiv(N, COLUMNS)
    rows, columns = tl.load(tile_first + E), wide * BESIDE
    kk = tl.arange(0, 128)
    for tile in tl.range(tl.program_id(0), rows * columns, programs):
        row, column = place(tile, rows, columns, HEIGHT)
        expert, first, end = tl.load(tiles + row * 3), tl.load(tiles + row * 3 + 1), tl.load(tiles + row * 3 + 2)
        p = first + tl.arange(0, ROWS)
        there = p < end
        source = p
        if TOKENS:
            source = tl.load(order + p, mask=there, other=0) // k
        matrix = expert * (BESIDE * SUMMED) + column // wide
        n0 = (column % wide) * COLUMNS
        x_at = x + source.to(tl.int64)[:, None] * x_r + kk[None, :]
        sx_at = sx + source * sx_r
        sw_at = sw + matrix * sw_s + (n0 // 128) * sw_n
        acc = tl.zeros((ROWS, COLUMNS), tl.float32)
        for kb in tl.range(0, SUMMED * G, num_stages=STAGES):
            part, g = 0, kb
            if SUMMED > 1:
                part = kb // G
                g = kb - part * G
            xs = tl.load(x_at + part * K + g * 128, mask=there[:, None] & (g * 128 + kk < K)[None, :], other=0.0)
            w = w_SNK.load([(matrix + part) * N + n0, g * 128])
            scale = tl.load(sx_at + kb * sx_g, mask=there, other=0.0) * tl.load(sw_at + part * sw_s + g * sw_g)
            acc = tl.fma(tl.dot(xs, w.T), scale[:, None], acc)
        n = n0 + tl.arange(0, COLUMNS)
        at = y + p.to(tl.int64)[:, None] * (N * BESIDE) + (column // wide) * N + n[None, :]
        tl.store(at, converted(acc, y), mask=there[:, None] & (n < N)[None, :])


def grouped(
    q_RK: Tensor,
    s_RG: Tensor,
    w_SNK: Tensor,
    s_SBG: Tensor,
    plan: Plan,
    out_dtype: torch.dtype = torch.bfloat16,
    tokens: bool = False,
    summed: int = 1,
) -> Tensor:
    """Y in BF16 or FP32, with a row for each position: [P, N], or [P, 2N] with two matrices per expert side by side.

    Args:
        q_RK: e4m3 with contiguous rows, [T, K] or [P, K]; [P, summed * K] for a sum of products.
        s_RG: its scales in groups of 128 columns of K, with any strides if ``summed`` is 1.
        w_SNK: contiguous rows. s_SBG: scales per block, with any strides.
        tokens: whether rows of X are tokens, not positions.
        summed: number of matrices per expert whose products are added.
    """
    S, N, K = w_SNK.shape
    P, E = plan.order.shape[0], plan.experts
    rows = plan.ids.shape[0] if tokens else P
    if S % (E * summed) or q_RK.shape != (rows, summed * K):
        raise ValueError(
            f"X {list(q_RK.shape)} does not fit {rows} rows, and W {list(w_SNK.shape)} of {E} experts with {summed} in a sum"
        )
    check_operand("X", q_RK, s_RG, (rows, summed * groups(K)))
    if w_SNK.dtype != FP8 or s_SBG.dtype != torch.float32 or s_SBG.shape != (S, groups(N), groups(K)):
        raise ValueError(
            f"W: expected {FP8} {[S, N, K]} with FP32 scales {[S, groups(N), groups(K)]}, found {w_SNK.dtype} with "
            f"{s_SBG.dtype} {list(s_SBG.shape)}"
        )
    beside = S // (E * summed)
    y = new_output((P, beside * N), out_dtype, q_RK, s_RG, w_SNK, s_SBG, plan.order)
    if y.numel():
        grid = programs(q_RK.device, plan.tiles.entries.shape[0] * beside * -(-N // TILE.columns), TILE.per_sm)
        grouped_kernel[grid](
            q_RK, descriptor(w_SNK.flatten(0, 1), TILE.columns), s_RG, s_SBG, y, plan.order, *plan.tiles, E, N, K,
            plan.ids.shape[1], q_RK.stride(0), *s_RG.stride(), *s_SBG.stride(), grid[0],
            TOKENS=tokens, BESIDE=beside, SUMMED=summed, ROWS=TILE.rows, COLUMNS=TILE.columns, STAGES=TILE.stages,
            HEIGHT=HEIGHT, num_warps=TILE.warps, num_stages=TILE.stages, **PINNED,
        )  # fmt: skip
    return y


def block_view(s_SNG: Tensor) -> Tensor:
    """A view of the scales per block [S, ceil(N / 128), G] in scales per row [S, N, G] of whole matrices."""
    return s_SNG[:, ::BLOCK]


# ---- WGrad of all experts in one launch: dW [E, N, K] = dY^T X over each expert's own tokens, in groups of 128.
#
#     dY^T e4m3 [N, M] row-major, s [M / 128, N];  X^T e4m3 [K, M] row-major, s [M / 128, K];  M = 128 for each group
#
# The groups are those of the ``Plan``: each belongs to one expert, and the last group of an expert is filled up with zeros. Two
# kernels write the operands, from values or from saved FP8 bytes, with the tokens contiguous as ``wgmma`` needs. An expert's sum
# is that of ``gemm_backward.wgrad`` over its own tokens, and zero if it has none.

#: columns of a tile of 128 tokens. A divisor of 128, so each row of a saved tile has one scale
SAVED_COLUMNS = 64


@triton.jit
def own_tokens(groups, group):  # type: ignore[no-untyped-def]
    """The positions of the 128 tokens of a group, and which of them exist."""
    p = tl.load(groups + group * 3 + 1) + tl.arange(0, 128)
    return p, p < tl.load(groups + group * 3 + 2)


@triton.jit(do_not_specialize=["E"])
def group_tokens_kernel(  # type: ignore[no-untyped-def]
    x, weights, order, groups, group_first, q, s, E, W, k, x_r, pitch,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, POW2: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """One group and COLUMNS columns of BF16 x [R, W]. TOKENS: a row is a token, multiplied by its pair's weight and rounded."""
    columns = tl.cdiv(W, COLUMNS)
    group = tl.program_id(0) // columns
    if group < tl.load(group_first + E):
        p, there = own_tokens(groups, group)
        n = (tl.program_id(0) % columns) * COLUMNS + tl.arange(0, COLUMNS)
        inside = there[:, None] & (n < W)[None, :]
        if TOKENS:
            pair = tl.load(order + p, mask=there, other=0)
            at = x + (pair // k).to(tl.int64)[:, None] * x_r + n[None, :]
            weight = tl.load(weights + pair, mask=there, other=0.0)
            tile = widened(tl.load(at, mask=inside, other=0.0), HARDWARE)
            tile = bf16_value(weight[:, None] * tile, HARDWARE)
        else:
            tile = widened(tl.load(x + p.to(tl.int64)[:, None] * x_r + n[None, :], mask=inside, other=0.0), HARDWARE)
        store_tokens(tile, q, s, group, n, W, pitch, POW2, HARDWARE)


@triton.jit(do_not_specialize=["E", "s_g"])  # one binary for every batch
def regroup_kernel(  # type: ignore[no-untyped-def]
    x, sx, order, groups, group_first, q, s, E, W, k, x_r, s_r, s_g, pitch,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, POW2: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """One group and COLUMNS columns of saved bytes [R, W] with 1x128 scales, requantized as by ``requantize_kernel``."""
    columns = tl.cdiv(W, COLUMNS)
    group = tl.program_id(0) // columns
    if group < tl.load(group_first + E):
        p, there = own_tokens(groups, group)
        n0 = (tl.program_id(0) % columns) * COLUMNS
        n = n0 + tl.arange(0, COLUMNS)
        source = p
        if TOKENS:
            source = tl.load(order + p, mask=there, other=0) // k
        row = source.to(tl.int64)
        codes = tl.load(x + row[:, None] * x_r + n[None, :], mask=there[:, None] & (n < W)[None, :], other=0)
        scale = tl.load(sx + row * s_r + (n0 // 128) * s_g, mask=there, other=1.0)
        tile = bf16_value(decode(codes, HARDWARE) * scale[:, None], HARDWARE)
        store_tokens(tile, q, s, group, n, W, pitch, POW2, HARDWARE)


@triton.jit(do_not_specialize=["E", "programs"])  # one binary for every batch
def grouped_wgrad_kernel(  # type: ignore[no-untyped-def]
    g_NM, x_KM, sg, sx, dw, group_first, E, N, K, programs, SIDE: tl.constexpr, STAGES: tl.constexpr, HEIGHT: tl.constexpr
):
    """``g_NM`` and ``x_KM`` are TMA descriptors with boxes of SIDE x 128."""
    rows, columns = tl.cdiv(N, SIDE), tl.cdiv(K, SIDE)
    for tile in tl.range(tl.program_id(0), E * rows * columns, programs):
        expert = tile // (rows * columns)
        row, column = place(tile % (rows * columns), rows, columns, HEIGHT)
        n = row * SIDE + tl.arange(0, SIDE)
        k = column * SIDE + tl.arange(0, SIDE)
        sg_at, sx_at = sg + n, sx + k
        first, end = tl.load(group_first + expert), tl.load(group_first + expert + 1)
        acc = tl.zeros((SIDE, SIDE), tl.float32)
        for group in tl.range(first, end, num_stages=STAGES):
            g = g_NM.load([row * SIDE, group * 128])
            x = x_KM.load([column * SIDE, group * 128])
            sg_here = tl.load(sg_at + group * N, mask=n < N, other=0.0)
            sx_here = tl.load(sx_at + group * K, mask=k < K, other=0.0)
            scale = sg_here[:, None] * sx_here[None, :]
            acc = tl.fma(tl.dot(g, x.T), scale, acc)
        at = dw + (expert.to(tl.int64) * N + n[:, None]) * K + k[None, :]
        tl.store(at, converted(acc, dw), mask=(n < N)[:, None] & (k < K)[None, :])


Operand = tuple[Tensor, Tensor]


def _new(x: Tensor, plan: Plan) -> tuple[Tensor, Tensor, tuple[int]]:
    """Bytes [W, M], scales [M / 128, W], and the grid of the kernel that writes them."""
    bound, W = plan.groups.entries.shape[0], x.shape[1]
    return *new_tokens(x, bound * BLOCK, W), (bound * -(-W // SAVED_COLUMNS),)


def group_tokens(x_RW: Tensor, plan: Plan, scale_format: ScaleFormat, weights_Tk: Tensor | None = None) -> Operand:
    """dY^T of BF16 rows: one per position, or with ``weights_Tk`` (FP32, contiguous) one per token, times its weight."""
    check_device(x_RW, plan.order)
    fixed, (q, s, grid) = options(scale_format), _new(x_RW, plan)
    tokens = weights_Tk is not None
    if q.numel():
        group_tokens_kernel[grid](
            x_RW, weights_Tk if tokens else s, plan.order, *plan.groups, q, s, plan.experts,
            x_RW.shape[1], plan.ids.shape[1], x_RW.stride(0), q.stride(0),
            TOKENS=tokens, COLUMNS=SAVED_COLUMNS, num_warps=4, **fixed,
        )  # fmt: skip
    return q.view(FP8), s


def regroup(q_RW: Tensor, s_RG: Tensor, plan: Plan, scale_format: ScaleFormat, tokens: bool) -> Operand:
    """X^T of saved FP8 rows: one per position, or with ``tokens`` one per token."""
    check_device(q_RW, s_RG, plan.order)
    fixed, (q, s, grid) = options(scale_format), _new(q_RW, plan)
    if q.numel():
        regroup_kernel[grid](
            q_RW.view(torch.uint8), s_RG, plan.order, *plan.groups, q, s, plan.experts,
            q_RW.shape[1], plan.ids.shape[1], q_RW.stride(0), *s_RG.stride(), q.stride(0),
            TOKENS=tokens, COLUMNS=SAVED_COLUMNS, num_warps=4, **fixed,
        )  # fmt: skip
    return q.view(FP8), s


def grouped_wgrad(g: Operand, x: Operand, plan: Plan, out_dtype: torch.dtype) -> Tensor:
    """dW [E, N, K] in BF16 or FP32 from the operands of ``group_tokens`` and ``regroup``."""
    (g_NM, sg), (x_KM, sx) = g, x
    N, K, bound = g_NM.shape[0], x_KM.shape[0], plan.groups.entries.shape[0]
    for name, q, s in (("dY^T", g_NM, sg), ("X^T", x_KM, sx)):
        if q.dtype != FP8 or q.shape[1] != bound * BLOCK or s.shape != (bound, q.shape[0]) or not s.is_contiguous():
            raise ValueError(f"{name}: expected {bound} groups of this plan, found {list(q.shape)} with {list(s.shape)}")
    dw = new_output((plan.experts, N, K), out_dtype, g_NM, sg, x_KM, sx, plan.order)
    if bound == 0:
        return dw.zero_()
    grid = programs(g_NM.device, plan.experts * -(-N // SIDE) * -(-K // SIDE), 1)
    grouped_wgrad_kernel[grid](
        descriptor(g_NM, SIDE), descriptor(x_KM, SIDE), sg, sx, dw, plan.groups.first, plan.experts, N, K, grid[0],
        SIDE=SIDE, STAGES=STAGES, HEIGHT=HEIGHT, num_warps=WGRAD_WARPS, num_stages=STAGES, **PINNED,
    )  # fmt: skip
    return dw
