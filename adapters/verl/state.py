"""What the patches of one process tell each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from jetrl_patch.sync.stream import SyncStats
from jetrl_patch.trainer import state


@dataclass
class WorkerState(state.Worker):
    """In a training worker.

    Attributes:
        rollout_tp: tensor parallel size of the rollout that this trainer feeds.
        stats: of the sync that is under way or was the last.
        measuring: in verl's bypass mode, whether the weights are still those of the last sync.
        measured: what the loss saw meanwhile, micro-batch by micro-batch (``correction_bypass``).
    """

    measuring: bool = False
    measured: list[Any] = field(default_factory=list)
    rollout_tp: int = 1
    stats: SyncStats | None = None


WORKER = WorkerState()
DRIVER = state.Driver()


def reset() -> None:
    """As at start; called by ``disable()``."""
    state.reset(WORKER, DRIVER)
