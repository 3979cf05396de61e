"""The bytes of a tensor that differ from an earlier version of it, packed into one uint8 tensor.

The bytes are taken in chunks of 16 MiB, so that finding the positions takes little memory. Each chunk is one record:

    head (four int32: changes, symbols, width, 0) · symbols · the new bytes · padding to a multiple of 16

The positions are written as gaps: the first position, then each one's distance from the one before, in symbols of one or two
bytes, whichever is smaller. A gap that does not fit is preceded by symbols of the largest value, which add that value and stand
for no change. So one byte in a hundred costs two bytes, and one in ten thousand costs three.

The unit is a byte whatever the dtype: an update of a BF16 weight mostly changes the lower of its two.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from jetrl_patch.errors import SyncError
from jetrl_patch.sync.manifest import ALIGNMENT

__all__ = ["apply", "encode"]

_CHUNK = 1 << 24  # bytes of the tensor in one record
_HEAD = 16  # bytes
#: width of a symbol -> its largest value, which stands for no change
_FILLER = {1: 0xFF, 2: 0xFFFF}


def encode(old: torch.Tensor, new: torch.Tensor) -> tuple[torch.Tensor | None, int]:
    """Pack what changed from ``old`` to ``new``, two tensors of one dtype and shape, ``new`` contiguous and on any device.

    Returns:
        The record, uint8 ``[n]`` on the device of ``new``, or None if the tensor itself is not larger; and the number of bytes
        that changed.
    """
    before, after = _bytes(old), _bytes(new)
    records: list[torch.Tensor] = []
    size = changed = 0
    for first, last in _chunks(after):
        chunk = after[first:last]
        at = (before[first:last].to(chunk.device) != chunk).nonzero().view(-1)
        changed += len(at)
        if size < len(after):
            records.append(_record(at, chunk[at]))
            size += len(records[-1])
    return (torch.cat(records) if size < len(after) else None), changed


def apply(base: torch.Tensor, packed: torch.Tensor) -> None:
    """Write the changes of ``encode`` into ``base``, a contiguous tensor on the CPU.

    Raises SyncError if the record does not fit the tensor; ``base`` may then be half written.
    """
    target = _bytes(base)
    record = torch.empty(packed.numel(), dtype=torch.uint8).copy_(packed)  # aligned, wherever it lay in its bucket
    place = 0
    for first, last in _chunks(target):
        place = _write(target[first:last], record, place)
    _require(place == len(record), f"{len(record) - place} bytes too many")


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(-1).view(torch.uint8)


def _chunks(data: torch.Tensor) -> Iterator[tuple[int, int]]:
    return ((first, min(first + _CHUNK, len(data))) for first in range(0, len(data), _CHUNK))


def _record(at: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Pack the positions, int64 ``[changes]`` in ascending order, and the new bytes there."""
    gaps = torch.diff(at, prepend=at.new_zeros(1))
    counts = {width: len(at) + int((gaps // filler).sum()) for width, filler in _FILLER.items()}
    width = min(counts, key=lambda width: width * counts[width])
    filler, count = _FILLER[width], counts[width]
    symbols = at.new_full((count,), filler)
    symbols[(gaps // filler + 1).cumsum(0) - 1] = gaps % filler
    parts = [symbols & 0xFF] if width == 1 else [symbols & 0xFF, symbols >> 8]
    head = torch.tensor([len(at), count, width, 0], dtype=torch.int32).view(torch.uint8).to(at.device)
    packed = torch.cat([head, torch.stack(parts, dim=1).to(torch.uint8).view(-1), values])
    return torch.nn.functional.pad(packed, (0, -len(packed) % ALIGNMENT))


def _write(target: torch.Tensor, record: torch.Tensor, place: int) -> int:
    """Write the record that begins at ``place`` into a chunk. Returns where the next one begins."""
    _require(place + _HEAD <= len(record), "a head is missing")
    changes, count, width, _ = record[place : place + _HEAD].view(torch.int32).tolist()
    _require(width in _FILLER and 0 <= changes <= min(count, len(target)), "a head is invalid")
    place += _HEAD
    values = place + width * count
    end = values + changes
    _require(end <= len(record), f"{end - len(record)} bytes are missing")
    parts = record[place:values].view(-1, width).to(torch.int64)
    symbols = parts[:, 0] if width == 1 else parts[:, 0] + (parts[:, 1] << 8)
    at = symbols.cumsum(0)[symbols != _FILLER[width]]
    _require(len(at) == changes, "the positions are not as many as the bytes")
    _require(changes == 0 or int(at[-1]) < len(target), "a position lies outside the tensor")
    target[at] = record[values:end]
    return end - end % -ALIGNMENT


def _require(fits: bool, why: str) -> None:
    if not fits:
        raise SyncError(f"the changes of a weight are malformed: {why}. Sync again.")
