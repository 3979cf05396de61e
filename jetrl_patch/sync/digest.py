"""A digest of a weight, additive over the pieces that another process holds.

A trainer holds ``q_proj.weight``. The rollout engine holds the same bytes as a slice of a fused, tensor-parallel parameter. To
compare the two without moving bytes, the digest is a *sum*:

    digest(T) = Σ_rc  row(r) · col(c) · (byte[r, c] + 1)      (mod 2**64)

where ``r`` is the row and ``c`` the byte column *in the whole tensor*. The digests of rectangles that tile the tensor add up to
the digest of the whole. A byte that is wrong, missing, duplicated or misplaced changes the sum. ``row`` and ``col`` are odd
64-bit hashes (splitmix64), so a single wrong byte always changes it. The digest guards against mistakes, not against an
adversary.

``start`` reads a tensor once: on the CPU with a C kernel, on CUDA with a Triton kernel, elsewhere with torch, all with the same
result. On a device the result stays there, and ``read`` fetches those of many tensors in one transfer. The result also tells
whether a BF16 or FP32 tensor holds NaN or Inf.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from jetrl_patch.errors import SyncError
from jetrl_patch.native import build, ops

#: ``(digest, whether a BF16 or FP32 tensor holds NaN or Inf)``, or the same as int64 [2] on a device
Pending: TypeAlias = tuple[int, bool] | torch.Tensor

_CHUNK_BYTES = 1 << 20  # bytes widened to int64 at a time: 8 MiB of extra memory
_MASK = (1 << 64) - 1


class Rect(NamedTuple):
    """A rectangle of a named tensor in one process: rows [row0, row1), columns [col0, col1).

    Columns count elements, not bytes. ``name`` is the Hugging Face tensor name that the trainer sends
    (``….weight`` or ``….weight_scale_inv``).
    """

    name: str
    row0: int
    row1: int
    col0: int
    col1: int
    digest: int


def as_2d(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as the matrix to digest: a vector is one row, higher ranks keep dim 0 as rows."""
    if tensor.dim() <= 1:
        return tensor.reshape(1, -1)
    return tensor.flatten(1)


def digest(tensor: torch.Tensor, row0: int = 0, col0: int = 0) -> int:
    """The digest of a tensor, or of a rectangle of a larger one.

    Args:
        tensor: any dtype, any rank (see ``as_2d``), contiguous or not.
        row0: first row of this rectangle in the whole tensor.
        col0: first column of this rectangle in the whole tensor, in elements.

    Returns:
        An int in [0, 2**64), additive (mod 2**64, see ``add``) over any tiling by rectangles.
    """
    return read([start(tensor, row0, col0)])[0][0]


def start(tensor: torch.Tensor, row0: int = 0, col0: int = 0) -> Pending:
    """Begin a digest, with the arguments of ``digest``. On a device nothing waits; pass the result to ``read``."""
    matrix = as_2d(tensor.detach())
    if matrix.numel() == 0:
        return 0, False
    if matrix.stride(1) != 1 and matrix.shape[1] > 1:
        matrix = matrix.contiguous()
    if not is_traceable_wrapper_subclass(matrix):  # a wrapper has no memory
        matrix = matrix.as_strided(matrix.shape, (matrix.stride(0), 1))
        if matrix.device.type == "cpu" and _native():
            return ops.digest(matrix, row0, col0)
        if matrix.is_cuda and _triton():
            from jetrl_patch.kernels.digest import digest as on_gpu

            return on_gpu(matrix, row0, col0)
    found = formula(matrix, row0, col0)
    return (int(found[0]) & _MASK, bool(found[1])) if found.device.type == "cpu" else found


def read(started: Sequence[Pending]) -> list[tuple[int, bool]]:
    """``(digest, whether a BF16 or FP32 tensor holds NaN or Inf)`` of each. Waits at most once per device."""
    done: dict[int, tuple[int, bool]] = {i: found for i, found in enumerate(started) if isinstance(found, tuple)}
    by_device: dict[torch.device, list[int]] = {}
    for i, found in enumerate(started):
        if isinstance(found, torch.Tensor):
            by_device.setdefault(found.device, []).append(i)
    for places in by_device.values():
        pairs: list[list[int]] = torch.stack([started[i] for i in places]).tolist()
        done |= {i: (value & _MASK, bool(special)) for i, (value, special) in zip(places, pairs, strict=True)}
    return [done[i] for i in range(len(started))]


def formula(matrix: torch.Tensor, row0: int = 0, col0: int = 0) -> torch.Tensor:
    """The definition in torch, for any device: int64 [2], as ``Pending``. The kernels are tested against it."""
    matrix = matrix.contiguous()
    size = matrix.element_size()
    bytes_RC = matrix.view(torch.uint8).reshape(matrix.shape[0], -1)
    rows, cols = bytes_RC.shape
    row_R = _odd_hash(torch.arange(row0, row0 + rows, device=matrix.device), salt=1)
    col_C = _odd_hash(torch.arange(col0 * size, col0 * size + cols, device=matrix.device), salt=2)
    total = torch.zeros((), dtype=torch.int64, device=matrix.device)
    step = max(1, _CHUNK_BYTES // cols)
    for first in range(0, rows, step):
        chunk = bytes_RC[first : first + step].to(torch.int64) + 1
        total += (row_R[first : first + step] * (chunk * col_C).sum(1)).sum()
    special = torch.zeros_like(total)
    if matrix.dtype in (torch.bfloat16, torch.float32):
        special += (~torch.isfinite(matrix)).any()
    return torch.stack((total, special))


def add(*digests: int) -> int:
    """Add digests: the digest of the tensor that the pieces tile."""
    return sum(digests) & _MASK


class Pieces:
    """The rectangles that a process holds and checks on them, collected on the device and read once."""

    def __init__(self) -> None:
        self._places: list[tuple[str, int, int, int, int]] = []
        self._started: list[Pending] = []
        self._wrong: list[tuple[torch.Tensor, str]] = []

    def add(self, name: str, row0: int, row1: int, col0: int, col1: int, data: torch.Tensor) -> None:
        """Add rows [row0, row1), columns [col0, col1) of a named tensor, with their data."""
        self._places.append((name, row0, row1, col0, col1))
        self._started.append(start(data, row0, col0))

    def refuse(self, wrong: torch.Tensor, why: str) -> None:
        """Have ``read`` raise SyncError with this text if ``wrong``, a bool [], is true."""
        self._wrong.append((wrong, why))

    def read(self) -> list[Rect]:
        """The rectangles, in the order in which they were added."""
        if self._wrong:
            found = torch.stack([wrong for wrong, _ in self._wrong]).tolist()
            for wrong, (_, why) in zip(found, self._wrong, strict=True):
                if wrong:
                    raise SyncError(why)
        return [Rect(*place, value) for place, (value, _) in zip(self._places, read(self._started), strict=True)]


@functools.cache
def _native() -> bool:
    return build.available()[0]


@functools.cache
def _triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _odd_hash(index: torch.Tensor, salt: int) -> torch.Tensor:
    """splitmix64 of int64 positions, forced odd. int64 arithmetic wraps around."""
    z = index.to(torch.int64) + _signed(0x9E3779B97F4A7C15 * salt)
    z = (z ^ _shift(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift(z, 27)) * _signed(0x94D049BB133111EB)
    return (z ^ _shift(z, 31)) | 1


def _shift(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift. int64 shifts in torch are arithmetic, so the sign bits are masked off."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    """The int64 with the same 64 bits."""
    value &= _MASK
    return value - (1 << 64) if value >= 1 << 63 else value
