"""Shared by the GEMM kernels: tile sizes and order, rounding, TMA descriptors, and checks of the operands.

Every function that launches a product raises TypeError or ValueError if its operands do not match, and ConfigError for a device
that is not a CUDA device.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from jetrl_patch.errors import ConfigError, explain
from jetrl_patch.kernels.formats import BLOCK, FP8, check_operand, groups

#: TMA requires rows that start at multiples of 16 bytes
ALIGN = 16
#: the kernels write ``fma`` where they mean it; the compiler must not fuse anything else
PINNED = {"enable_fp_fusion": False}


class Tile(NamedTuple):
    """An output tile: its rows and columns, warps, pipeline stages, and programs per SM."""

    rows: int
    columns: int
    warps: int
    stages: int
    per_sm: int


#: Both tiles have at least the 64 rows that FP8 ``wgmma`` needs; 16 or 32 rows would become half-precision ``mma.sync``. The
#: narrow one is for layers with few output features: it doubles the number of programs, which a decode step needs
NARROW = Tile(rows=128, columns=64, warps=4, stages=4, per_sm=2)
WIDE = Tile(rows=128, columns=128, warps=8, stages=4, per_sm=1)
WIDE_FROM = 8192
#: number of programs that fill a Hopper GPU (132 SMs). A constant, so that the sizes alone choose the tile
FILLED = 120


def tile_for(columns: int, rows: int = 0) -> Tile:
    """The tile for this many output columns, and for this many rows if they count.

    Two narrow tiles run on an SM where one wide tile does, so both take as many waves. A wide one loads two thirds of the bytes.
    """
    fills = -(-rows // WIDE.rows) * -(-columns // WIDE.columns) >= FILLED
    return WIDE if fills or columns >= WIDE_FROM else NARROW


#: the tiles for up to 64 rows, the widest first: one ``wgmma`` high, with many pipeline stages that load weights early
FEW_ROWS = 64
FEW = tuple(Tile(FEW_ROWS, columns, 4, stages, 2) for columns, stages in ((128, 4), (64, 6), (32, 8)))


def few_tile_for(columns: int, tiles: tuple[Tile, ...] = FEW) -> Tile:
    """The tile for few rows and this many output columns: the widest that still gives enough programs, else the narrowest.

    Its width may differ from that of ``tile_for``. The sum of a block of 128 is the same: four ``wgmma`` of k = 32 in the same
    order, the same promotion, the same order of K. Only the instruction has another number of columns, and a dot product does not
    involve other columns. A trial on the machine checks this, as for fused weights (``row_equality``).
    """
    return next((tile for tile in tiles if -(-columns // tile.columns) >= FILLED), tiles[-1])


@triton.jit
def place(tile, rows, columns, HEIGHT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Map a tile's number to (row, column), in bands of HEIGHT rows: programs that run together share operands."""
    band = HEIGHT * columns
    first = (tile // band) * HEIGHT
    height = tl.minimum(rows - first, HEIGHT)
    return first + (tile % band) % height, (tile % band) // height


@triton.jit
def rounded(x):  # type: ignore[no-untyped-def]
    """Round FP32 to the nearest BF16, ties to even. A NaN stays a (quiet) NaN.

    Uses bits, because the interpreter's conversion truncates and is wrong for subnormals.
    """
    bits = x.to(tl.uint32, bitcast=True)
    nearest = tl.where(x == x, bits + 0x7FFF + ((bits >> 16) & 1), bits | 0x400000)
    return (nearest >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def converted(x, like):  # type: ignore[no-untyped-def]
    """Convert a sum to the dtype of the pointer ``like`` (BF16 or FP32), rounding once."""
    if like.dtype.element_ty == tl.bfloat16:
        return rounded(x)
    else:
        return x


def descriptor(q: Tensor, rows: int) -> TensorDescriptor:
    """A TMA descriptor of a row-major e4m3 matrix, read in boxes of [rows, 128]. Elements outside read as 0.

    Copies a matrix whose rows do not start at multiples of 16 bytes.
    """
    height, width = q.shape
    pitch = -(-width // ALIGN) * ALIGN
    if q.stride() != (pitch, 1) or q.data_ptr() % ALIGN:
        padded = torch.empty(height, pitch, dtype=torch.uint8, device=q.device)
        padded[:, :width] = q.view(torch.uint8)
        q = padded.view(FP8)[:, :width]
    return TensorDescriptor(q, [height, width], [pitch, 1], [rows, BLOCK])


def programs(device: torch.device, tiles: int, per_sm: int) -> tuple[int]:
    """The grid: as many persistent programs as run at the same time. Each of n programs computes every n-th tile."""
    return (min(tiles, per_sm * _multiprocessors(device)),)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":  # the interpreter
        return 4
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def scaled_in_blocks(x_MK: Tensor, w_NK: Tensor, sw: Tensor) -> bool:
    """Whether the scales of W are per block, [ceil(N / 128), G], not per row, [N, G]. Checks them, and that X and W share K."""
    N, K = w_NK.shape
    if x_MK.shape[1] != K:
        raise ValueError(f"X {list(x_MK.shape)} and W {list(w_NK.shape)} differ in K")
    blocks = sw.shape[0] == groups(N) != N
    check_operand("W", w_NK, sw, (groups(N) if blocks else N, groups(K)))
    return blocks


def new_output(shape: tuple[int, ...], out_dtype: torch.dtype, *operands: Tensor) -> Tensor:
    """Allocate a result on the operands' device.

    Raises:
        TypeError: the kernels cannot write this dtype.
        ValueError, ConfigError: as ``check_device``.
    """
    if out_dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"the output dtype must be torch.bfloat16 or torch.float32, found {out_dtype}")
    check_device(*operands)
    return torch.empty(shape, dtype=out_dtype, device=operands[0].device)


def check_device(*tensors: Tensor) -> None:
    """Check that all tensors are on the current device and that Triton can run there.

    Raises:
        ValueError: the tensors are on several devices, or not on the current one.
        ConfigError: the device is a CPU and the interpreter is off.
    """
    devices = {t.device for t in tensors}
    if len(devices) != 1:
        raise ValueError(f"operands are on several devices: {', '.join(sorted(map(str, devices)))}")
    device = tensors[0].device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        raise ValueError(
            f"operands are on {device}, but kernels launch on the current device, cuda:{torch.cuda.current_device()}. "
            f"Select the operands' device with torch.cuda.device(...)."
        )
    if device.type != "cuda" and not triton.knobs.runtime.interpret:
        fix = 'use backend="native" or backend="torch" there'
        raise ConfigError(explain("the Triton kernels", required="a CUDA device", found=device, fix=fix))


# ---- Block scales [ceil(N / 128), G] from the per-row scales [N, G] of a weight, in one launch ----
# If the rows of a block differ in scale, the block gets NaN. The error shows in the result, and the host need not wait for the
# GPU.

#: groups per program
WIDTH = 32


@triton.jit
def block_scales_kernel(s, out, N, G, s_n, s_g, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    wide = tl.cdiv(G, WIDTH)
    block = tl.program_id(0) // wide
    n = block * 128 + tl.arange(0, 128)
    g = (tl.program_id(0) % wide) * WIDTH + tl.arange(0, WIDTH)
    inside = (n < N)[:, None] & (g < G)[None, :]
    first = tl.load(s + block * 128 * s_n + g * s_g, mask=g < G, other=0.0)
    rows = tl.load(s + n[:, None] * s_n + g[None, :] * s_g, mask=inside, other=0.0)
    other = tl.max(((rows != first[None, :]) & inside).to(tl.int32), 0)
    tl.store(out + block * G + g, tl.where(other == 0, first, float("nan")), mask=g < G)


def block_scales(s_NG: Tensor) -> Tensor:
    """FP32 [ceil(N / 128), G] from FP32 [N, G] with any strides; NaN if the rows of a block differ."""
    if s_NG.dtype != torch.float32:
        raise TypeError(f"scales must be torch.float32, found {s_NG.dtype}")
    check_device(s_NG)
    N, G = s_NG.shape
    out = torch.empty(groups(N), G, dtype=torch.float32, device=s_NG.device)
    if out.numel():
        grid = (groups(N) * -(-G // WIDTH),)
        block_scales_kernel[grid](s_NG, out, N, G, *s_NG.stride(), WIDTH=WIDTH, num_warps=4, **PINNED)
    return out
