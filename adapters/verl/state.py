"""State that the patches of one process share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from jetrl_patch.sync.stream import SyncStats
from jetrl_patch.trainer import state
from jetrl_patch.trainer.audit import Audit


@dataclass
class WorkerState(state.Worker):
    """State of a training worker.

    Attributes:
        rollout_tp: tensor parallel size of the rollout.
        stats: of the current or last weight sync.
        measuring: whether the weights have not changed since the last sync, so that a loss can compare log-probs.
        compared: whether a loss of the current mini-batch did.
        measured: in verl's bypass mode, the loss's sums since that sync, one per micro-batch (``correction_bypass``).
        audit: with ``old_log_probs="rollout"``, what the losses compared (``old_log_probs``).
    """

    measuring: bool = False
    compared: bool = False
    measured: list[Any] = field(default_factory=list)
    audit: Audit = field(default_factory=Audit)
    rollout_tp: int = 1
    stats: SyncStats | None = None


@dataclass(kw_only=True)
class DriverState(state.Driver):
    """State of the trainer loop, with what ``old_log_probs="rollout"`` needs (``old_log_probs``).

    Attributes:
        fresh: whether the policy has not been updated since the last sync.
        given_up: whether a token differed, so that the pass runs until the end of the run.
        audit: comparisons of the samples that went through the pass; None if this step's old log-probs are the pass's.
        corrected: metrics of the correction that verl applied to the step.
        unknown: keys of verl's log whose values a step without the pass does not have.
    """

    fresh: bool = False
    given_up: bool = False
    audit: Audit | None = None
    corrected: dict[str, float] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()


WORKER = WorkerState()
DRIVER = DriverState()


def reset() -> None:
    """Restore the initial state. Called by ``disable()``."""
    state.reset(WORKER, DRIVER)
