"""The kernels of a mixture's experts: each takes all experts in one launch, whatever their number.

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

from jetrl_patch.kernels.aot import Spec
from jetrl_patch.kernels.formats import BLOCK, FP8, groups
from jetrl_patch.kernels.gemm_backward import transposed
from jetrl_patch.kernels.gemm_common import (
    PINNED,
    Tile,
    box,
    check_device,
    check_operand,
    check_output,
    converted,
    descriptor,
    place,
    programs,
)
from jetrl_patch.kernels.gemm_grouped_wgrad import group_tokens, grouped_wgrad, regroup
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
# A row is a position of the ``Plan``, or the token of that position's pair, which the kernel looks up: no row is copied. A
# position's sum is that of ``gemm.fprop`` for the same row: the same instruction, K ascending in blocks of 128, one ``fma`` of a
# block with sX * sW. One tile serves every number of tokens, so a row's bits depend on its own bytes and its expert alone: not
# on how many tokens that expert has, nor on where the row stands among them.

TILE = Tile(rows=ROWS, columns=128, warps=4, stages=4, per_sm=2)
#: rows of tiles per band; see ``place``
HEIGHT = 8


@triton.jit(do_not_specialize=["E", "sx_g", "programs"])  # one binary for every batch
def grouped_kernel(  # type: ignore[no-untyped-def]
    x, w_SNK, sx, sw, y, order, tiles, tile_first, E, N, K, k, x_r, sx_r, sx_g, sw_s, sw_n, sw_g, programs,
    TOKENS: tl.constexpr, BESIDE: tl.constexpr, SUMMED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, HEIGHT: tl.constexpr,
):  # fmt: skip
    """``w_SNK`` is a TMA descriptor of [S * N, K] with boxes of COLUMNS x 128. A box that ends in the next matrix gives columns
    that are not stored. TOKENS: a row of x is a token, and not a position.
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
    """Y in BF16 or FP32, a row for each position: [P, N] or, with two matrices an expert side by side, [P, 2N].

    Args:
        q_RK: e4m3 with contiguous rows, [T, K] or [P, K]; [P, summed * K] for a sum of products.
        s_RG: its scales in groups of 128 columns of K, with any strides if ``summed`` is 1.
        w_SNK: contiguous rows. s_SBG: scales per block, with any strides.
        tokens: rows of X are tokens; else they are positions.
        summed: how many matrices of an expert are multiplied and added up.

    Raises:
        TypeError, ValueError: the operands do not match.
        ConfigError: the device is not a CUDA device.
    """
    check_output(out_dtype)
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
    check_device(q_RK, s_RG, w_SNK, s_SBG, plan.order)
    beside = S // (E * summed)
    y = torch.empty(P, beside * N, dtype=out_dtype, device=q_RK.device)
    if y.numel():
        tile = TILE
        grid = programs(q_RK.device, plan.tiles.entries.shape[0] * beside * -(-N // tile.columns), tile.per_sm)
        grouped_kernel[grid](
            q_RK, descriptor(w_SNK.flatten(0, 1), tile.columns), s_RG, s_SBG, y, plan.order, plan.tiles.entries,
            plan.tiles.first, E, N, K, plan.ids.shape[1], q_RK.stride(0), *s_RG.stride(), *s_SBG.stride(), grid[0],
            TOKENS=tokens, BESIDE=beside, SUMMED=summed, ROWS=tile.rows, COLUMNS=tile.columns, STAGES=tile.stages,
            HEIGHT=HEIGHT, num_warps=tile.warps, num_stages=tile.stages, **PINNED,
        )  # fmt: skip
    return y


def block_view(s_SNG: Tensor) -> Tensor:
    """The scales per block [S, ceil(N / 128), G] among scales per row [S, N, G] of whole matrices: a view."""
    return s_SNG[:, ::BLOCK]


def _spec(name: str, out: str, tokens: bool, beside: int, summed: int) -> Spec:
    sizes = ("E", "N", "K", "k", "x_r", "sx_r", "sx_g", "sw_s", "sw_n", "sw_g", "programs")
    return Spec(
        name=f"grouped_{name}_{out}",
        kernel=grouped_kernel,
        types={
            "x": "*fp8e4nv", "w_SNK": box(TILE.columns), "sx": "*fp32", "sw": "*fp32", "y": f"*{out}",
            **dict.fromkeys(("order", "tiles", "tile_first"), "*i32"), **dict.fromkeys(sizes, "i32"),
        },
        constexprs={
            "TOKENS": tokens, "BESIDE": beside, "SUMMED": summed, "ROWS": TILE.rows, "COLUMNS": TILE.columns,
            "STAGES": TILE.stages, "HEIGHT": HEIGHT,
        },
        options={"num_warps": TILE.warps, "num_stages": TILE.stages, **PINNED},
        aligned=("N", "K", "x_r"),
    )  # fmt: skip


KERNELS: tuple[Spec, ...] = (
    _spec("gate_up", "bf16", True, 2, 1),
    _spec("down", "fp32", False, 1, 1),
    _spec("down_dgrad", "fp32", True, 1, 1),
    _spec("gate_up_dgrad", "fp32", False, 1, 2),
)
