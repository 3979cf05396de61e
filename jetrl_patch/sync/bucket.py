"""Pack a stream of tensors into flat byte buffers, each with an index of its tensors.

A framework that makes one remote call per tensor makes one per bucket instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch

from jetrl_patch.errors import SyncError
from jetrl_patch.sync.manifest import ALIGNMENT, dtype_name
from jetrl_patch.sync.stream import NamedTensor

__all__ = ["BUCKET_BYTES", "Bucket", "Entry", "pack", "unpack"]

#: extra memory that a sync needs on each side: a bucket that travels and the next one, half of this each
BUCKET_BYTES = 256 << 20

#: (name, dtype such as "float8_e4m3fn", shape, byte offset): plain types that JSON can carry
Entry = tuple[str, str, list[int], int]


@dataclass
class Bucket:
    """Bytes, uint8 ``[n]``, and the tensors they contain."""

    flat: torch.Tensor
    entries: list[Entry] = field(default_factory=list)


def pack(stream: Iterable[NamedTensor], device: torch.device, limit: int = BUCKET_BYTES) -> Iterator[Bucket]:
    """Copy the tensors of a stream into buckets of at most ``limit // 2`` bytes. A larger tensor gets its own bucket.

    One bucket is filled while another travels: a bucket is valid until the next but one is requested.
    """
    half = limit // 2
    buffer, other = (torch.empty(0, dtype=torch.uint8, device=device) for _ in range(2))
    entries: list[Entry] = []
    used = 0
    for name, tensor in stream:
        if entries and used + tensor.nbytes > half:
            yield Bucket(buffer[:used], entries)
            buffer, other = other, buffer
            entries, used = [], 0
        source = tensor.detach().contiguous().view(-1).view(torch.uint8)
        kind = dtype_name(tensor.dtype)
        if tensor.nbytes > half:  # a copy: the framework may free the tensor when the next one is requested
            yield Bucket(source.to(device, copy=True), [(name, kind, list(tensor.shape), 0)])
            continue
        if not buffer.numel():
            buffer = torch.empty(half + ALIGNMENT, dtype=torch.uint8, device=device)
        buffer[used : used + tensor.nbytes].copy_(source)
        entries.append((name, kind, list(tensor.shape), used))
        used += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    if entries:
        yield Bucket(buffer[:used], entries)


def unpack(flat: torch.Tensor, entries: Iterable[Entry]) -> list[NamedTensor]:
    """Return views into the bytes, in packing order. Raises SyncError if an entry is invalid."""
    found: list[NamedTensor] = []
    for name, dtype, shape, start in entries:
        kind = getattr(torch, dtype, None)
        if not isinstance(kind, torch.dtype):
            raise SyncError(f"{name} arrived with the unknown dtype {dtype!r}. Install the same versions on both sides.")
        size = math.prod(shape) * kind.itemsize
        if min(start, *shape, 0) < 0 or start % ALIGNMENT or start + size > flat.numel():
            place = f"bytes {start}:{start + size}"
            raise SyncError(f"{name} should lie at {place}, but {flat.numel()} bytes arrived, aligned to {ALIGNMENT}")
        found.append((name, flat[start : start + size].view(kind).view(shape)))
    return found
