"""What the last sync sent, kept on both sides so that the next one can send changes only (``sync="delta"``).

    sender                                            receiver
    the engine's identity == mine?  ◀── identity ───  of its last complete sync, "" if there is none
    manifest (identity of the base) ───────────────▶  refuses another base
    per tensor: changes, or itself  ───────────────▶  base + changes = the tensor, which is loaded and checked as ever

The identity of a sync is a hash over the digests of all its tensors: equal identities mean equal bytes, whoever counted what. A
sync that begins takes the identity away on both sides, and only its end gives a new one. So an engine that restarted, missed a
sync or failed in one reports another identity, and gets everything.

Each side keeps whole tensors, as they are sent, in CPU memory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from jetrl_patch.errors import SyncError, explain
from jetrl_patch.sync import delta

__all__ = ["Base", "NamedTensor", "Received", "Sent", "SyncStats", "held_by"]

NamedTensor = tuple[str, torch.Tensor]

#: in front of the name of a tensor of which only the changes are sent
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
        self._against = ""  # identity of the sync that this one builds on; empty if it sends everything

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
        """Say what every receiver of the next sync reports as its identity; empty if they differ."""
        self._held = held

    def begin(self) -> str:
        """Begin a sync. Returns the identity of its base for the manifest; empty if everything is sent."""
        self._against = self.identity if self.identity == self._held else ""
        self.identity = self._held = ""
        return self._against

    def pack(self, name: str, tensor: torch.Tensor, stats: SyncStats) -> NamedTensor:
        """Return what to send for a contiguous tensor: its changes, or the tensor where that is smaller."""
        kept = self._tensors.get(name) if self._against else None
        changes, changed = None, tensor.nbytes
        if kept is not None and _alike(kept, tensor):
            changes, changed = delta.encode(kept, tensor)
        stats.full += tensor.nbytes
        stats.changed += changed
        if changed or changes is None:
            self._keep(name, tensor)
        return (name, tensor) if changes is None else (PREFIX + name, changes)


class Received(Base):
    """The receiver's base."""

    def begin(self, base: str) -> None:
        """Begin a sync over ``base``, the manifest's. Raises SyncError if this is another one."""
        if base and base != self.identity:
            raise SyncError(
                explain(
                    "the base of a delta sync",
                    required=base,
                    found=self.identity or "none in this engine, which restarted or failed in a sync",
                    fix="sync again: everything is sent then",
                )
            )
        self._against, self.identity = base, ""

    def whole(self, name: str, tensor: torch.Tensor) -> NamedTensor:
        """Return the tensor that arrived, or that its changes make. Raises SyncError if they fit nothing that is kept."""
        if not name.startswith(PREFIX):
            self._keep(name, tensor)
            return name, tensor
        name = name.removeprefix(PREFIX)
        kept = self._tensors.get(name) if self._against else None
        if kept is None:
            raise SyncError(f"changes of {name} arrived, but this engine has no earlier version of it. Sync again.")
        delta.apply(kept, tensor)
        return name, kept.to(tensor.device)


def held_by(engines: Iterable[Iterable[Mapping[str, Any]]]) -> str:
    """Return the identity of the weights that all workers of all engines keep; empty if they differ.

    Args:
        engines: what each worker of each engine answered, its identity under ``"held"``.
    """
    held = {worker["held"] for workers in engines for worker in workers}
    return held.pop() if len(held) == 1 else ""


def _alike(kept: torch.Tensor, tensor: torch.Tensor) -> bool:
    return kept.dtype == tensor.dtype and kept.shape == tensor.shape
