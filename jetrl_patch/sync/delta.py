"""``sync="delta"``: what both sides keep of the last sync, and the bytes that have changed since."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from jetrl_patch.errors import SyncError, explain
from jetrl_patch.sync.protocol import ALIGNMENT

# ---- The bytes of a tensor that differ from an earlier version of it, packed into one uint8 tensor
# Bytes are compared in chunks of 16 MiB, which bounds the memory for positions. Each chunk is one record:
#
#     head (four int32: changes, symbols, width, 0) · symbols · the new bytes · padding to a multiple of 16
#
# Positions are written as gaps: the first position, then the distance of each one from its predecessor. A gap is a symbol of one
# or two bytes, whichever makes the record smaller. The largest symbol means "add this value, no change here" and comes before a
# gap that is too large for one symbol. One changed byte in a hundred costs two bytes; one in ten thousand costs three.
#
# The unit is a byte for every dtype: an update of a BF16 weight mostly changes the lower of its two.

_CHUNK = 1 << 24  # bytes of the tensor in one record
_HEAD = 16  # bytes
#: width of a symbol -> its largest value, which stands for no change
_FILLER = {1: 0xFF, 2: 0xFFFF}


def encode(old: torch.Tensor, new: torch.Tensor) -> tuple[torch.Tensor | None, int]:
    """Pack what changed from ``old`` to ``new``, two tensors of one dtype and shape, ``new`` contiguous and on any device.

    Returns:
        The record, uint8 ``[n]`` on the device of ``new``, or None if it is not smaller than the tensor; and the number of bytes
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
    record = torch.empty(packed.numel(), dtype=torch.uint8).copy_(packed)  # aligned, unlike in its bucket
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
    """Write the record at ``place`` into a chunk. Returns the place of the next one."""
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


# ---- What the last sync sent, kept on both sides; the next one sends only changes (``sync="delta"``)
#     sender                                            receiver
#     the engine's identity == mine?  ◀── identity ───  of its last complete sync, "" if there is none
#     manifest (identity of the base) ───────────────▶  refuses another base
#     per tensor: changes, or itself  ───────────────▶  base + changes = the tensor, which is loaded and checked as ever
#
# The identity of a sync is a hash over the digests of all its tensors, so equal identities mean equal bytes. Both sides drop the
# identity when a sync begins, and set the new one at its end. An engine that has restarted, missed a sync or failed in one
# therefore reports another identity, and gets everything. Each side keeps whole tensors, as they are sent, in CPU memory.

NamedTensor = tuple[str, torch.Tensor]

#: before the name of a tensor of which only the changes are sent
PREFIX = "jetrl.delta."


@dataclass
class SyncStats:
    """Counts of one sync, sizes in bytes; filled while the stream runs.

    Attributes:
        total: all tensors, as sent.
        quantized: the quantized layers, weights and scales, as sent.
        quantized_as_bf16: the same layers in BF16.
        layers: number of quantized layers.
        tensors: number of tensors, scales included.
        full: with ``sync="delta"``, all tensors.
        changed: the bytes among them that differ from the base.
        digests: by name, once they have been read from the device.
    """

    total: int = 0
    quantized: int = 0
    quantized_as_bf16: int = 0
    layers: int = 0
    tensors: int = 0
    full: int = 0
    changed: int = 0
    digests: dict[str, int] = field(default_factory=dict)


class Base:
    """The tensors of one sync.

    Attributes:
        identity: of the last complete sync; empty before the first, during one, and after a failed one.
    """

    def __init__(self) -> None:
        self.identity = ""
        self._tensors: dict[str, torch.Tensor] = {}
        self._against = ""  # identity of this sync's base; empty if it sends everything

    def seal(self, digests: Mapping[str, int]) -> None:
        """End a sync with the digests of all its tensors. Tensors of earlier syncs are dropped."""
        self._tensors = {name: self._tensors[name] for name in digests}
        self.identity = hashlib.sha256(json.dumps(sorted(digests.items())).encode()).hexdigest()[:32]

    def _keep(self, name: str, tensor: torch.Tensor) -> None:
        kept = self._tensors.get(name)
        if kept is not None and _alike(kept, tensor):
            kept.copy_(tensor)
        else:
            self._tensors[name] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


class Sent(Base):
    """The sender's base: one for all its receivers, which get the same stream."""

    def __init__(self) -> None:
        super().__init__()
        self._held = ""

    def offer(self, held: str) -> None:
        """Set the identity that every receiver of the next sync reports; empty if they differ."""
        self._held = held

    def begin(self) -> str:
        """Begin a sync. Returns the identity of its base for the manifest; empty if everything is sent."""
        self._against = self.identity if self.identity == self._held else ""
        self.identity = self._held = ""
        return self._against

    def pack(self, name: str, tensor: torch.Tensor, stats: SyncStats) -> NamedTensor:
        """What to send for a contiguous tensor: its changes, or the tensor if that is smaller."""
        kept = self._tensors.get(name) if self._against else None
        changes, changed = None, tensor.nbytes
        if kept is not None and _alike(kept, tensor):
            changes, changed = encode(kept, tensor)
        stats.full += tensor.nbytes
        stats.changed += changed
        if changed or changes is None:
            self._keep(name, tensor)
        return (name, tensor) if changes is None else (PREFIX + name, changes)


class Received(Base):
    """The receiver's base."""

    def begin(self, base: str) -> None:
        """Begin a sync over the manifest's base. Raises SyncError if it is another one than this."""
        if base and base != self.identity:
            found = self.identity or "none in this engine, which restarted or failed in a sync"
            fix = "sync again, which sends everything"
            raise SyncError(explain("the base of a delta sync", required=base, found=found, fix=fix))
        self._against, self.identity = base, ""

    def whole(self, name: str, tensor: torch.Tensor) -> NamedTensor:
        """The tensor that arrived, or that results from its changes. Raises SyncError if they do not fit what is kept."""
        if not name.startswith(PREFIX):
            self._keep(name, tensor)
            return name, tensor
        name = name.removeprefix(PREFIX)
        kept = self._tensors.get(name) if self._against else None
        if kept is None:
            raise SyncError(f"changes of {name} arrived, but this engine has no earlier version of it. Sync again.")
        apply(kept, tensor)
        return name, kept.to(tensor.device)


def held_by(engines: Iterable[Iterable[Mapping[str, Any]]]) -> str:
    """The identity of the weights that all workers of all engines keep; empty if they differ.

    Args:
        engines: the answer of each worker of each engine, with the identity under ``"held"``.
    """
    held = {worker["held"] for workers in engines for worker in workers}
    return held.pop() if len(held) == 1 else ""


def _alike(kept: torch.Tensor, tensor: torch.Tensor) -> bool:
    return kept.dtype == tensor.dtype and kept.shape == tensor.shape
