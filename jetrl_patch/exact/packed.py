"""How many sequences a packed batch holds at most, as the framework knows it on the host.

Attention needs the boundaries of the sequences, which lie in the positions on the device. With a bound on their number the
boundaries fill a tensor of fixed size, and the host need not wait for the device to count them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

_ATTRIBUTE = "_jetrl_sequences"


class _Bound(threading.local):
    value: int | None = None


_bound = _Bound()


def mark(positions: Tensor, at_most: int) -> None:
    """Note a bound for the batch with these positions. A copy of them has none: its boundaries are then counted."""
    setattr(positions, _ATTRIBUTE, at_most)


@contextlib.contextmanager
def sequences(at_most: int) -> Iterator[None]:
    """A bound for every packed batch of this thread in the block."""
    before, _bound.value = _bound.value, at_most
    try:
        yield
    finally:
        _bound.value = before


def bound(positions: Tensor | None) -> int | None:
    """The bound for a batch with these positions, if there is one."""
    own: int | None = getattr(positions, _ATTRIBUTE, None)
    return _bound.value if own is None else own


class Boundaries(NamedTuple):
    """cu_seqlens int32 [at_most + 1], whose last sequences may be empty, and whether the bound was too small (bool [])."""

    cu_seqlens: Tensor
    exceeded: Tensor


def boundaries(begins: Tensor, at_most: int) -> Boundaries:
    """Return the boundaries of the sequences that begin where ``begins`` [T] is true, without a wait for the device."""
    T = begins.shape[0]
    places = torch.where(begins, torch.arange(T, device=begins.device), T)
    starts = places.sort().values[:at_most]
    cu = torch.nn.functional.pad(starts, (0, 1), value=T).to(torch.int32)
    return Boundaries(cu, begins.sum() > at_most)
