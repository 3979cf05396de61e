"""The precision guard around a weight sync: the policy decides, and other models of the process follow it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

from jetrl_patch.sync.source import Source
from jetrl_patch.sync.stream import NamedTensor

__all__ = ["Followers", "begin_sync"]


class Followers:
    """Models of this process that leave FP8 where the policy does; a model that is gone is no longer among them."""

    def __init__(self) -> None:
        self._sources: list[weakref.ref[Source]] = []

    def add(self, source: Source) -> None:
        """From now on ``source`` follows."""
        self._sources.append(weakref.ref(source))

    def to_bf16(self, names: Iterable[str]) -> None:
        """Take these layers out of FP8 in every model that still has them there. Raises SyncError."""
        names = list(names)
        for reference in self._sources:
            source = reference()
            if source is not None:
                source.to_bf16(names)


def begin_sync(
    source: Source, weights: Callable[[], Iterable[NamedTensor]], followers: Followers, quantizes: bool = True
) -> None:
    """Before a sync's first byte, on every rank: all ranks agree, and the guard's decision is carried out. Collective.

    Args:
        weights: gives the full weights to look at; asked only where the guard decides at this sync.
        quantizes: whether this rank quantizes them.

    Raises SyncError where a layer cannot be changed; no engine has heard of it then.
    """
    source.agree()
    followers.to_bf16(source.begin_sync(weights, quantizes))
