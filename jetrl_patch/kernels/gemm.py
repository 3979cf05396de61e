"""FProp in FP8 ``wgmma``: a kernel for quantized rows, and one for few rows that also quantizes them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl_patch.config.formats import ScaleFormat
from jetrl_patch.errors import explain
from jetrl_patch.kernels.common import check_input, magnitude, options, quantized, widened
from jetrl_patch.kernels.formats import check_operand, groups, split_width
from jetrl_patch.kernels.gemm_common import FEW as FEW_TILES
from jetrl_patch.kernels.gemm_common import (
    FEW_ROWS,
    PINNED,
    Tile,
    converted,
    descriptor,
    few_tile_for,
    new_output,
    place,
    programs,
    scaled_in_blocks,
    tile_for,
)

# ---- FProp on Hopper: Y [M, N] = round(sum over blocks kb, ascending, of fma(dot128(qX, qW), sX * sW, acc))
#     X e4m3 [M, K] row-major, s [M, G];  W e4m3 [N, K] row-major, s [N, G] (per row) or [ceil(N / 128), G] (per block)
#     Y [M, N];  G = ceil(K / 128)
#
# Both operands have K contiguous, the only layout that FP8 ``wgmma`` accepts. The dot product of a block starts from a fresh
# accumulator (four ``wgmma`` of k = 32) and is promoted to FP32 by an explicit ``fma``, as in the formula. A row's bits depend
# only on that row: the order of K is fixed, no two programs share a sum, and the tiles, which follow from M and N, differ in rows
# and columns alone (``few_tile_for``).

#: rows of tiles per band; see ``place``
HEIGHT = 8


@triton.jit(do_not_specialize=["M", "programs"])  # one binary for every batch
def fprop_kernel(  # type: ignore[no-untyped-def]
    x_MK, w_NK, sx, sw, y, M, N, K, sx_m, sx_g, sw_n, sw_g, programs,
    BLOCKS: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
    HEIGHT: tl.constexpr,
):  # fmt: skip
    """``x_MK`` and ``w_NK`` are TMA descriptors with boxes of ROWS x 128 and COLUMNS x 128.

    With BLOCKS, ``sw`` holds one scale per 128 rows of W, so a tile reads one scalar per block of K. Scales per row take a load
    and a product for every column. The products are the same numbers.
    """
    rows, columns = tl.cdiv(M, ROWS), tl.cdiv(N, COLUMNS)
    blocks = tl.cdiv(K, 128) // SPLITS
    for tile in tl.range(tl.program_id(0), rows * columns, programs):
        row, column = place(tile, rows, columns, HEIGHT)
        m = row * ROWS + tl.arange(0, ROWS)
        n = column * COLUMNS + tl.arange(0, COLUMNS)
        sx_at = sx + tl.minimum(m, M - 1) * sx_m
        if BLOCKS:
            sw_at = sw + (column * COLUMNS // 128) * sw_n
        else:
            sw_at = sw + tl.minimum(n, N - 1) * sw_n
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for split in tl.range(0, SPLITS):
            acc = tl.zeros((ROWS, COLUMNS), tl.float32)
            for kb in tl.range(split * blocks, (split + 1) * blocks, num_stages=STAGES):
                x = x_MK.load([row * ROWS, kb * 128])
                w = w_NK.load([column * COLUMNS, kb * 128])
                if BLOCKS:
                    scale = (tl.load(sx_at + kb * sx_g) * tl.load(sw_at + kb * sw_g))[:, None]
                else:
                    scale = tl.load(sx_at + kb * sx_g)[:, None] * tl.load(sw_at + kb * sw_g)[None, :]
                acc = tl.fma(tl.dot(x, w.T), scale, acc)
            total = tl.where(split == 0, acc, total + acc)  # a sum of zeros keeps its sign
        at = y + m.to(tl.int64)[:, None] * N + n[None, :]
        tl.store(at, converted(total, y), mask=(m < M)[:, None] & (n < N)[None, :])


def fprop(
    q_MK: Tensor, s_MG: Tensor, w_NK: Tensor, sw: Tensor, out_dtype: torch.dtype = torch.bfloat16, splits: int = 1,
    few: bool = True,
) -> Tensor:  # fmt: skip
    """Y [M, N] in BF16 or FP32, as ``backends.quantize.fprop``. Scales may have any strides.

    Args:
        sw: scales of W per row [N, G], or per block [ceil(N / 128), G]: the same bits with fewer instructions.
        few: use tiles of their own for up to 64 rows.
    """
    (M, K), N = q_MK.shape, w_NK.shape[0]
    blocks = scaled_in_blocks(q_MK, w_NK, sw)
    check_operand("X", q_MK, s_MG, (M, groups(K)))
    split_width(K, splits)  # raises if that cuts a block
    y = new_output((M, N), out_dtype, q_MK, s_MG, w_NK, sw)
    if y.numel():
        few_tile = few and splits == 1 and M <= FEW_ROWS
        tile = few_tile_for(N) if few_tile else tile_for(N, M if splits == 1 else 0)
        launch(q_MK, s_MG, w_NK, sw, y, tile, blocks, splits)
    return y


def launch(
    q_MK: Tensor, s_MG: Tensor, w_NK: Tensor, sw: Tensor, y_MN: Tensor, tile: Tile, blocks: bool, splits: int = 1
) -> None:
    """Write the product of checked operands to ``y_MN``. With ``blocks``, ``sw`` has one scale per 128 rows of W."""
    (M, K), N = q_MK.shape, w_NK.shape[0]
    grid = programs(q_MK.device, -(-M // tile.rows) * -(-N // tile.columns), tile.per_sm)
    fprop_kernel[grid](
        descriptor(q_MK, tile.rows), descriptor(w_NK, tile.columns), s_MG, sw, y_MN, M, N, K, *s_MG.stride(), *sw.stride(),
        grid[0], BLOCKS=blocks, SPLITS=splits, ROWS=tile.rows, COLUMNS=tile.columns, STAGES=tile.stages, HEIGHT=HEIGHT,
        num_warps=tile.warps, num_stages=tile.stages, **PINNED,
    )  # fmt: skip


# ---- FProp of few BF16 rows in one launch: each 1x128 group of X is quantized right before its product
#     X BF16 [M, K], M <= 64;  W e4m3 [N, K] row-major, s [N, G] (per row);  Y [M, N];  G = ceil(K / 128)
#
# The bytes equal those of ``quantize_rows``, and the product is that of ``fprop`` for few rows: the same ``wgmma`` (with fewer
# columns if scales are per row and N is large), K ascending in blocks of 128, one scale product and one ``fma`` per block. So a
# row has the bits of the two separate launches. Every program quantizes all rows, which pays off only for few (``FEW_TOKENS``).

#: rows of a tile, and the maximum that this kernel accepts
ROWS = FEW_ROWS
#: maximum number of rows for which it replaces the two launches. Every program reads X in BF16 from the L2 cache. At 64 rows, X
#: has one to two times the bytes of the program's weights and costs more than a launch; at 32, half of that (computed, not
#: measured)
FEW_TOKENS = 32
#: columns of a tile -> pipeline stages, programs per SM. A stage also holds 16 KiB of X in BF16
PIPELINE = {128: (4, 1), 64: (4, 2), 32: (5, 2)}
#: tiles for scales per row and per block. The widest needs scales per block: with 128 scales per row, the rows to quantize
#: and the sum, a thread would run out of registers
TILES = (FEW_TILES[1:], FEW_TILES)


@triton.jit(do_not_specialize=["M"])  # one binary for every batch
def decode_kernel(  # type: ignore[no-untyped-def]
    x, w_NK, sw, y, M, N, K, x_m, sw_n, sw_g, programs,
    BLOCKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, POW2: tl.constexpr,
    HARDWARE: tl.constexpr,
):  # fmt: skip
    """``w_NK`` is a TMA descriptor with boxes of COLUMNS x 128. BLOCKS as in ``fprop_kernel``."""
    columns = tl.cdiv(N, COLUMNS)
    m, k = tl.arange(0, ROWS), tl.arange(0, 128)
    for column in tl.range(tl.program_id(0), columns, programs):
        n = column * COLUMNS + tl.arange(0, COLUMNS)
        if BLOCKS:
            sw_at = sw + (column * COLUMNS // 128) * sw_n
        else:
            sw_at = sw + tl.minimum(n, N - 1) * sw_n
        acc = tl.zeros((ROWS, COLUMNS), tl.float32)
        for kb in tl.range(0, tl.cdiv(K, 128), num_stages=STAGES):
            at = x + m[:, None] * x_m + kb * 128 + k[None, :]
            inside = (m < M)[:, None] & (kb * 128 + k < K)[None, :]
            tile = widened(tl.load(at, mask=inside, other=0.0), HARDWARE)
            w = w_NK.load([column * COLUMNS, kb * 128])
            codes, sx = quantized(tile, tl.max(magnitude(tile), 1, keep_dims=True), POW2, HARDWARE)
            if BLOCKS:
                scale = sx * tl.load(sw_at + kb * sw_g)
            else:
                scale = sx * tl.load(sw_at + kb * sw_g)[None, :]
            acc = tl.fma(tl.dot(codes.to(tl.float8e4nv, bitcast=True), w.T), scale, acc)
        tl.store(y + m[:, None] * N + n[None, :], converted(acc, y), mask=(m < M)[:, None] & (n < N)[None, :])


def fprop_few(
    x_MK: Tensor, w_NK: Tensor, sw: Tensor, scale_format: ScaleFormat, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """``fprop(*quantize_rows(x), w, sw)`` for at most 64 BF16 rows, each contiguous, bit for bit. Other strides are free."""
    check_input("x", x_MK)
    (M, K), N = x_MK.shape, w_NK.shape[0]
    if M > ROWS:
        raise ValueError(explain("FProp in one launch", required=f"at most {ROWS} rows", found=M, fix="use quantize_rows"))
    blocks = scaled_in_blocks(x_MK, w_NK, sw)
    y = new_output((M, N), out_dtype, x_MK, w_NK, sw)
    if y.numel() == 0:
        return y
    tile = few_tile_for(N, TILES[blocks])
    stages, per_sm = PIPELINE[tile.columns]
    grid = programs(x_MK.device, -(-N // tile.columns), per_sm)
    decode_kernel[grid](
        x_MK, descriptor(w_NK, tile.columns), sw, y, M, N, K, x_MK.stride(0), *sw.stride(), grid[0],
        BLOCKS=blocks, ROWS=ROWS, COLUMNS=tile.columns, STAGES=stages, num_warps=tile.warps, num_stages=stages,
        **options(scale_format),
    )  # fmt: skip
    return y
