"""The precision guard around a weight sync: the policy decides, other models of the process follow."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

from jetrl_patch.sync.source import Source
from jetrl_patch.sync.stream import NamedTensor

__all__ = ["Followers", "begin_sync"]


class Followers:
    """Models of this process that move layers to BF16 with the policy. Holds weak references only."""

    def __init__(self) -> None:
        self._sources: list[weakref.ref[Source]] = []

    def add(self, source: Source) -> None:
        """Let ``source`` follow from now on."""
        self._sources.append(weakref.ref(source))

    def to_bf16(self, names: Iterable[str]) -> None:
        """Move these layers to BF16 in every follower that has them in FP8. Raises SyncError."""
        names = list(names)
        for reference in self._sources:
            source = reference()
            if source is not None:
                source.to_bf16(names)


def begin_sync(
    source: Source, weights: Callable[[], Iterable[NamedTensor]], followers: Followers, quantizes: bool = True
) -> None:
    """Agree across ranks and carry out the guard's decision, before the first byte of a sync. Collective.

    Args:
        weights: yields the full weights; called only if the guard decides at this sync.
        quantizes: whether this rank quantizes them.

    Raises SyncError if a layer cannot be moved; no engine has been told then.
    """
    source.agree()
    followers.to_bf16(source.begin_sync(weights, quantizes))
