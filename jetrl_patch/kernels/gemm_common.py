"""What the three GEMM kernels share: which tile a program takes, how a sum is rounded, how operands are handed over."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from jetrl_patch.errors import ConfigError
from jetrl_patch.fp8.formats import BLOCK, FP8

#: TMA reads rows that start at multiples of 16 bytes
ALIGN = 16
#: a scale product and its addition are written as ``fma``; the compiler must not fuse anything else
PINNED = {"enable_fp_fusion": False}


class Tile(NamedTuple):
    """Rows and columns of an output tile, the warps that compute it, the depth of its pipeline, and how many share an SM."""

    rows: int
    columns: int
    warps: int
    stages: int
    per_sm: int


#: Both are at least 64 rows high, which is what FP8 ``wgmma`` needs (16 and 32 would become FP16 ``mma.sync``).
#: The narrow one gives a layer with few output features twice the programs when few rows are decoded.
NARROW = Tile(rows=128, columns=64, warps=4, stages=4, per_sm=2)
WIDE = Tile(rows=128, columns=128, warps=8, stages=4, per_sm=1)
WIDE_FROM = 8192


def tile_for(columns: int) -> Tile:
    """The tile of a product with so many output columns. M has no say: a row's bits must not depend on it."""
    return WIDE if columns >= WIDE_FROM else NARROW


@triton.jit
def place(tile, rows, columns, HEIGHT: tl.constexpr):  # type: ignore[no-untyped-def]
    """(row, column) of a tile's number: bands of HEIGHT rows, so that programs that run together share operands."""
    band = HEIGHT * columns
    first = (tile // band) * HEIGHT
    height = tl.minimum(rows - first, HEIGHT)
    return first + (tile % band) % height, (tile % band) // height


@triton.jit
def rounded(x):  # type: ignore[no-untyped-def]
    """FP32 to the nearest BF16, ties to even.

    On bits, because the interpreter's own conversion cuts and misses subnormals; a NaN stays one (its quiet bit is kept).
    """
    bits = x.to(tl.uint32, bitcast=True)
    nearest = tl.where(x == x, bits + 0x7FFF + ((bits >> 16) & 1), bits | 0x400000)
    return (nearest >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def converted(x, like):  # type: ignore[no-untyped-def]
    """The sum in the dtype of the pointer ``like`` (BF16 or FP32), rounded once."""
    if like.dtype.element_ty == tl.bfloat16:
        return rounded(x)
    else:
        return x


def descriptor(q: Tensor, rows: int, columns: int = BLOCK) -> TensorDescriptor:
    """A TMA descriptor of a row-major e4m3 matrix, read in boxes of [rows, columns]; what lies outside reads as 0.

    Rows that do not start at multiples of 16 bytes are copied to a padded matrix first (odd sizes only).
    """
    height, width = q.shape
    pitch = -(-width // ALIGN) * ALIGN
    if q.stride() != (pitch, 1) or q.data_ptr() % ALIGN:
        padded = torch.empty(height, pitch, dtype=torch.uint8, device=q.device)
        padded[:, :width] = q.view(torch.uint8)
        q = padded.view(FP8)[:, :width]
    return TensorDescriptor(q, [height, width], [pitch, 1], [rows, columns])


def box(rows: int, columns: int = BLOCK) -> str:
    """Triton's name for the type of such a descriptor."""
    return f"tensordesc<fp8e4nv[{rows},{columns}]>"


def programs(device: torch.device, tiles: int, per_sm: int) -> tuple[int]:
    """The grid: as many programs as run at once, each of which takes every so-many-th tile."""
    return (min(tiles, per_sm * _multiprocessors(device)),)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":  # the interpreter
        return 4
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def check_operand(name: str, q: Tensor, s: Tensor, scale_shape: tuple[int, int]) -> None:
    """Refuse what the kernels would read wrongly.

    Raises:
        TypeError: not e4m3 with FP32 scales.
        ValueError: a shape that does not fit.
    """
    if q.dtype != FP8 or s.dtype != torch.float32:
        raise TypeError(f"{name}: expected {FP8} with torch.float32 scales, found {q.dtype} with {s.dtype}")
    if q.dim() != 2 or s.shape != scale_shape:
        raise ValueError(f"{name}: {list(q.shape)} needs scales of shape {list(scale_shape)}, found {list(s.shape)}")
    if s.device != q.device:
        raise ValueError(f"{name}: the matrix is on {q.device}, its scales on {s.device}")


def check_output(out_dtype: torch.dtype) -> None:
    """Raises TypeError for an output dtype that the kernels do not write."""
    if out_dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"the output is torch.bfloat16 or torch.float32, found {out_dtype}")


def check_device(*tensors: Tensor) -> None:
    """All on one device, the current one, and one that Triton can run on.

    Raises:
        ValueError: several devices, or not the current one.
        ConfigError: a CPU without the interpreter.
    """
    devices = {t.device for t in tensors}
    if len(devices) != 1:
        raise ValueError(f"operands lie on several devices: {', '.join(sorted(map(str, devices)))}")
    device = tensors[0].device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        raise ValueError(
            f"operands lie on {device}, but the current device is cuda:{torch.cuda.current_device()}, and kernels start "
            f"there; select theirs with torch.cuda.device(...)"
        )
    if device.type != "cuda" and not triton.knobs.runtime.interpret:
        raise ConfigError(
            f'the Triton kernels run on CUDA devices, found {tensors[0].device}; use backend="native" or "torch" there'
        )
