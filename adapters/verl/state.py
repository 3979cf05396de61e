"""State that the patches of one process share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from jetrl_patch.sync.stream import SyncStats
from jetrl_patch.trainer import state


@dataclass
class WorkerState(state.Worker):
    """State of a training worker.

    Attributes:
        rollout_tp: tensor parallel size of the rollout.
        stats: of the current or last weight sync.
        measuring: in verl's bypass mode, whether the weights have not changed since the last sync.
        measured: the loss's sums since then, one per micro-batch (``correction_bypass``).
    """

    measuring: bool = False
    measured: list[Any] = field(default_factory=list)
    rollout_tp: int = 1
    stats: SyncStats | None = None


WORKER = WorkerState()
DRIVER = state.Driver()


def reset() -> None:
    """Restore the initial state. Called by ``disable()``."""
    state.reset(WORKER, DRIVER)
