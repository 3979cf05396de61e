"""FProp of a few BF16 rows in one launch: each 1x128 group of X is quantized right before its product.

    X BF16 [M, K], M <= 64;  W e4m3 [N, K] row-major, s [N, G] (per row);  Y [M, N];  G = ceil(K / 128)

The bytes equal those of ``quantize_rows`` (``e4m3``), and the product is that of ``gemm.fprop`` with as few rows: the same
``wgmma`` (but for its columns, where scales are per row and N is large), K ascending in blocks of 128, and one scale product
and one ``fma`` per block. A row's bits therefore equal those of the two separate launches. Every program quantizes the rows
again, which pays off only for few rows (``FEW``).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl_patch.errors import explain
from jetrl_patch.fp8.formats import ScaleFormat
from jetrl_patch.kernels.aot import Spec
from jetrl_patch.kernels.e4m3 import magnitude, quantized, widened
from jetrl_patch.kernels.gemm_common import FEW as FEW_TILES
from jetrl_patch.kernels.gemm_common import (
    FEW_ROWS,
    Tile,
    box,
    check_device,
    check_output,
    converted,
    descriptor,
    few_tile_for,
    programs,
    weight_scales,
)
from jetrl_patch.kernels.outputs import COMPILER, check_input, options

#: rows of a tile, and the maximum that this kernel accepts
ROWS = FEW_ROWS
#: up to this many rows it replaces the two launches. Every program reads X in BF16 from the L2 cache: at 64 rows that is one
#: to two times the bytes of its weights and costs more than a launch, at 32 half of that (computed, not measured)
FEW = 32
#: pipeline stages and programs per SM by the columns of a tile: a stage also holds 16 KiB of X in BF16
PIPELINE = {128: (4, 1), 64: (4, 2), 32: (5, 2)}
#: by whether scales are per block: the rows to quantize, the sum and 128 scales would not fit into a thread's registers
TILES = (FEW_TILES[1:], FEW_TILES)


@triton.jit(do_not_specialize=["M"])  # one binary for every batch
def decode_kernel(  # type: ignore[no-untyped-def]
    x, w_NK, sw, y, M, N, K, x_m, sw_n, sw_g, programs,
    BLOCKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, POW2: tl.constexpr,
    HARDWARE: tl.constexpr,
):  # fmt: skip
    """``w_NK`` is a TMA descriptor with boxes of COLUMNS x 128. BLOCKS as in ``gemm.fprop_kernel``."""
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


def fprop(
    x_MK: Tensor,
    w_NK: Tensor,
    s_NG: Tensor | None,
    scale_format: ScaleFormat,
    out_dtype: torch.dtype = torch.bfloat16,
    s_blocks: Tensor | None = None,
) -> Tensor:
    """``gemm.fprop(*quantize_rows(x), w, s)`` for at most 64 rows, bit for bit; scales may have any strides.

    Args:
        x_MK: BF16 with contiguous rows; the row stride is free.
        s_NG, s_blocks: as for ``gemm.fprop``.

    Raises:
        TypeError, ValueError: the operands do not match, or there are too many rows.
        ConfigError: the device is not a CUDA device.
    """
    check_input("x", x_MK)
    check_output(out_dtype)
    (M, K), N = x_MK.shape, w_NK.shape[0]
    if M > ROWS:
        raise ValueError(explain("FProp in one launch", required=f"at most {ROWS} rows", found=M, fix="use quantize_rows"))
    if w_NK.shape[1] != K:
        raise ValueError(f"X {list(x_MK.shape)} and W {list(w_NK.shape)} differ in K")
    sw = weight_scales(w_NK, s_NG, s_blocks)
    check_device(x_MK, w_NK, sw)
    y = torch.empty(M, N, dtype=out_dtype, device=x_MK.device)
    if y.numel() == 0:
        return y
    tile = few_tile_for(N, TILES[s_blocks is not None])
    stages, per_sm = PIPELINE[tile.columns]
    grid = programs(x_MK.device, -(-N // tile.columns), per_sm)
    decode_kernel[grid](
        x_MK, descriptor(w_NK, tile.columns), sw, y, M, N, K, x_MK.stride(0), *sw.stride(), grid[0],
        BLOCKS=s_blocks is not None, ROWS=ROWS, COLUMNS=tile.columns, STAGES=stages, num_warps=tile.warps, num_stages=stages,
        **options(x_MK, scale_format),
    )  # fmt: skip
    return y


def _spec(tile: Tile, out: str, scale: str, blocks: bool) -> Spec:
    stages, _ = PIPELINE[tile.columns]
    integers = dict.fromkeys(("M", "N", "K", "x_m", "sw_n", "sw_g", "programs"), "i32")
    return Spec(
        name=f"decode_{ROWS}x{tile.columns}_{out}{'_blocks' * blocks}_{scale}",
        kernel=decode_kernel,
        types={"x": "*bf16", "w_NK": box(tile.columns), "sw": "*fp32", "y": f"*{out}", **integers},
        constexprs={
            "BLOCKS": blocks, "ROWS": ROWS, "COLUMNS": tile.columns, "STAGES": stages, "POW2": scale == "pow2",
            "HARDWARE": True,
        },
        options={"num_warps": tile.warps, "num_stages": stages, **COMPILER},
        aligned=("N", "K", "x_m"),
    )  # fmt: skip


KERNELS = tuple(
    _spec(tile, out, scale, blocks)
    for blocks in (False, True)
    for scale in ("pow2", "fp32")
    for tile in TILES[blocks]
    for out in ("bf16", "fp32")
)
