"""Shared by the GEMM kernels: tile sizes and order, rounding, TMA descriptors, and checks of the operands."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from jetrl_patch.errors import ConfigError, explain
from jetrl_patch.kernels.aot import Spec
from jetrl_patch.kernels.formats import BLOCK, FP8, groups

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


#: Both have at least the 64 rows that FP8 ``wgmma`` needs (16 and 32 would become FP16 ``mma.sync``).
#: The narrow tile doubles the number of programs for a layer with few output features when few rows are decoded.
NARROW = Tile(rows=128, columns=64, warps=4, stages=4, per_sm=2)
WIDE = Tile(rows=128, columns=128, warps=8, stages=4, per_sm=1)
WIDE_FROM = 8192


def tile_for(columns: int) -> Tile:
    """The tile of more rows for a product with this many output columns."""
    return WIDE if columns >= WIDE_FROM else NARROW


#: the tiles of up to 64 rows, the widest first: one ``wgmma`` high, with the weights of many blocks of K on their way
FEW_ROWS = 64
FEW = tuple(Tile(FEW_ROWS, columns, 4, stages, 2) for columns, stages in ((128, 4), (64, 6), (32, 8)))
#: the largest M that takes them; 0 once a trial has found on this machine that their rows are not those of the other tiles
_few_rows = FEW_ROWS
#: so many programs fill a Hopper GPU (132 SMs; an H200 is not asked, so that N alone decides)
FILLED = 120


def few_rows() -> int:
    """The largest M whose products take ``few_tile_for``."""
    return _few_rows


def give_up_few_rows() -> bool:
    """From now on every product of this process takes ``tile_for``. Returns whether some did not."""
    global _few_rows
    had, _few_rows = _few_rows > 0, 0
    return had


def few_tile_for(columns: int, tiles: tuple[Tile, ...] = FEW) -> Tile:
    """The tile of few rows for this many output columns: the widest of which enough run at once, else the narrowest.

    It may have another width than ``tile_for``'s. Within a block of 128 a sum is the same four ``wgmma`` of k = 32 in the same
    order, and so are the promotion and the order of K. Only the number of columns of the instruction differs, and an element's
    dot product has no part in other columns. As for weights that are fused (``row_equality``), the trial on the machine judges.
    """
    return next((tile for tile in tiles if -(-columns // tile.columns) >= FILLED), tiles[-1])


@triton.jit
def place(tile, rows, columns, HEIGHT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Map a tile's number to (row, column), in bands of HEIGHT rows, so that concurrent programs share operands."""
    band = HEIGHT * columns
    first = (tile // band) * HEIGHT
    height = tl.minimum(rows - first, HEIGHT)
    return first + (tile % band) % height, (tile % band) // height


@triton.jit
def rounded(x):  # type: ignore[no-untyped-def]
    """Round FP32 to the nearest BF16, ties to even; a NaN stays a (quiet) NaN.

    Uses bits, because the interpreter's conversion truncates and mishandles subnormals.
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


def descriptor(q: Tensor, rows: int, columns: int = BLOCK) -> TensorDescriptor:
    """A TMA descriptor of a row-major e4m3 matrix, read in boxes of [rows, columns]; elements outside read as 0.

    A matrix whose rows do not start at multiples of 16 bytes is first copied to a padded one.
    """
    height, width = q.shape
    pitch = -(-width // ALIGN) * ALIGN
    if q.stride() != (pitch, 1) or q.data_ptr() % ALIGN:
        padded = torch.empty(height, pitch, dtype=torch.uint8, device=q.device)
        padded[:, :width] = q.view(torch.uint8)
        q = padded.view(FP8)[:, :width]
    return TensorDescriptor(q, [height, width], [pitch, 1], [rows, columns])


def box(rows: int, columns: int = BLOCK) -> str:
    """Triton's type name for a descriptor with this box."""
    return f"tensordesc<fp8e4nv[{rows},{columns}]>"


def programs(device: torch.device, tiles: int, per_sm: int) -> tuple[int]:
    """The grid: as many persistent programs as run concurrently; each takes tiles at that stride."""
    return (min(tiles, per_sm * _multiprocessors(device)),)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":  # the interpreter
        return 4
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def check_operand(name: str, q: Tensor, s: Tensor, scale_shape: tuple[int, int]) -> None:
    """Check an operand before a kernel reads it.

    Raises:
        TypeError: it is not e4m3 with FP32 scales.
        ValueError: a shape or device does not match.
    """
    if q.dtype != FP8 or s.dtype != torch.float32:
        raise TypeError(f"{name}: expected {FP8} with torch.float32 scales, found {q.dtype} with {s.dtype}")
    if q.dim() != 2 or s.shape != scale_shape:
        raise ValueError(f"{name}: {list(q.shape)} needs scales of shape {list(scale_shape)}, found {list(s.shape)}")
    if s.device != q.device:
        raise ValueError(f"{name}: the matrix is on {q.device}, its scales on {s.device}")


def weight_scales(w_NK: Tensor, s_NG: Tensor | None, s_blocks: Tensor | None) -> Tensor:
    """The scales of W that a product reads: those per block if they are given, else those per row; both are checked.

    Raises:
        TypeError, ValueError: as ``check_operand``, or there are none.
    """
    N, K = w_NK.shape
    for s, rows in ((s_NG, N), (s_blocks, groups(N))):
        if s is not None:
            check_operand("W", w_NK, s, (rows, groups(K)))
    sw = s_NG if s_blocks is None else s_blocks
    if sw is None:
        raise ValueError("W: expected its scales per row or per block, found neither")
    return sw


def check_output(out_dtype: torch.dtype) -> None:
    """Raise TypeError for an output dtype that the kernels cannot write."""
    if out_dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"the output dtype must be torch.bfloat16 or torch.float32, found {out_dtype}")


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
        raise ConfigError(
            explain(
                "the Triton kernels",
                required="a CUDA device",
                found=tensors[0].device,
                fix='use backend="native" or backend="torch" there',
            )
        )


# ---- Convert per-row weight scales [N, G] to the block scales [ceil(N / 128), G] that DeepGEMM reads, in one launch
# A block whose rows differ in scale gets NaN: the error stays visible in the result and needs no GPU synchronization.

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
    """FP32 [ceil(N / 128), G] from FP32 [N, G] with any strides; NaN if the rows of a block differ.

    Raises:
        TypeError: the scales are not FP32.
        ValueError, ConfigError: as ``check_device``.
    """
    if s_NG.dtype != torch.float32:
        raise TypeError(f"scales must be torch.float32, found {s_NG.dtype}")
    check_device(s_NG)
    N, G = s_NG.shape
    out = torch.empty(groups(N), G, dtype=torch.float32, device=s_NG.device)
    if out.numel():
        grid = (groups(N) * -(-G // WIDTH),)
        block_scales_kernel[grid](s_NG, out, N, G, *s_NG.stride(), WIDTH=WIDTH, num_warps=4, **PINNED)
    return out


KERNELS: tuple[Spec, ...] = (
    Spec(
        "block_scales",
        block_scales_kernel,
        {"s": "*fp32", "out": "*fp32", **dict.fromkeys(("N", "G", "s_n", "s_g"), "i32")},
        {"WIDTH": WIDTH},
        {"num_warps": 4, **PINNED},
        ("N",),
    ),
)
