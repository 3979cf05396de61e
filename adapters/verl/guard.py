"""The precision guard and the monitor in verl's weight sync, in a training worker.

Before a sync the guard decides, from all ranks' figures, and every rank carries it out; what is sent then says so. After
the sync the figures of its step go with its report to the trainer loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from jetrl_patch.adapters.verl.state import WORKER
from jetrl_patch.sync.source import Source
from jetrl_patch.sync.stream import NamedTensor


def decide(
    source: Source, weights: Iterable[NamedTensor], again: Callable[[], Iterable[NamedTensor]]
) -> Iterable[NamedTensor]:
    """Take layers of the actor out of FP8, and of the reference models in this process. Collective.

    Args:
        weights: full weights to look at, where the guard decides at this sync.
        again: gives them once more.

    Returns:
        The weights to send. Raises SyncError where a layer cannot be changed; no engine has heard of it then.
    """
    looks = source.monitor is not None and source.monitor.decides
    new = source.begin_sync(lambda: weights)
    for reference in WORKER.references:
        other = reference()
        if other is not None:
            other.to_bf16(new)
    return again() if looks else weights


def report(engine: Any) -> dict[str, Any]:
    """Metrics of the step that this sync ends, and lines for the trainer loop's log. Collective.

    Raises PrecisionError where the figures are to stop the run.
    """
    prepared = getattr(engine, "_jetrl", None)
    if prepared is None:
        return {"monitor": {}, "lines": []}
    return {"monitor": prepared.end_sync(), "lines": prepared.take_lines()}
