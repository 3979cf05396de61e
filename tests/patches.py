"""A patch's replacement as the session applies it. In other processes, or under other settings, the original runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from jetrl_patch import session
from jetrl_patch.patching.patch import gated
from jetrl_patch.registry import Patch


def applied(make: Callable[[Any], Any], patches: Iterable[Patch], original: Callable[..., Any]) -> Callable[..., Any]:
    """``make(original)``, gated by the patch among ``patches`` that has this ``make``; asks what a test sets in ``session``."""
    patch = next(patch for patch in patches if patch.make is make)
    assert not patch.always

    def runs() -> bool:
        return session.is_active() and (patch.when is None or patch.when(session.active_config()))

    return gated(make(original), original, runs)
