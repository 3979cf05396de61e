"""What the patches of one process tell each other."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

from jetrl_patch.precision.loss_scale import LossScale
from jetrl_patch.sync.stream import SyncStats


@dataclass
class WorkerState:
    """In a training worker.

    Attributes:
        rollout_tp: tensor parallel size of the rollout that this trainer feeds.
        stats: of the sync that is under way or was the last.
        loss_scale: of the policy's optimizer, in a mode that has one.
        measuring: in verl's bypass mode, whether the weights are still those of the last sync.
        measured: what the loss saw meanwhile, micro-batch by micro-batch (``correction_bypass``).
        references: reference models of this process, which follow the actor's precision guard.
    """

    measuring: bool = False
    measured: list[Any] = field(default_factory=list)
    rollout_tp: int = 1
    stats: SyncStats | None = None
    loss_scale: LossScale = field(default_factory=LossScale)
    references: list[weakref.ref[Any]] = field(default_factory=list)


@dataclass
class DriverState:
    """In the process that runs verl's trainer loop: figures that wait for the next line of its log."""

    metrics: dict[str, Any] = field(default_factory=dict)


WORKER = WorkerState()
DRIVER = DriverState()


def reset() -> None:
    """As at start; called by ``disable()``."""
    WORKER.__init__()  # type: ignore[misc]
    DRIVER.__init__()  # type: ignore[misc]
