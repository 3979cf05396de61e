"""State that the patches of one process share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from jetrl_patch.sync.base import Sent
from jetrl_patch.sync.source import Source
from jetrl_patch.sync.stream import SyncStats
from jetrl_patch.trainer import state
from jetrl_patch.trainer.audit import Audit
from jetrl_patch.trainer.marks import MARK
from jetrl_patch.trainer.mismatch import Compared


@dataclass(kw_only=True)
class Prepared(Source):
    """An engine's model as it was before sharding, and the vocabulary of verl's rollout.

    Attributes:
        vocabulary: number of tokens in the tokenizer; verl's rollout samples no token beyond them.
        banned: tokens of the tokenizer that verl's rollout never samples.
        adapters: name of each LoRA layer in peft's model -> scaling; None without LoRA, or where verl serves adapters.
    """

    vocabulary: int | None = None
    banned: list[int] = field(default_factory=list)
    adapters: dict[str, float] | None = None


@dataclass
class WorkerState(state.Worker):
    """State of a training worker.

    Attributes:
        rollout_tp: tensor parallel size of the rollout. rollout_ep: its expert parallel size.
        stats: of the current or last weight sync.
        separate: whether that sync goes over a checkpoint engine, to a rollout with devices of its own.
        broken: what broke the stream of such a sync.
        base: what the last sync sent, if this one may send changes only.
        held: what the engines reported as theirs before a sync over a checkpoint engine.
        saved: digests of the weights that verl has saved to restore them later, by its key and by parameter (``old_weights``).
        measuring: whether the weights have not changed since the last sync, so that a loss can compare log-probs.
        compared: whether a loss of the current mini-batch did.
        measured: in verl's bypass mode, the loss's sums since that sync, one per micro-batch (``correction_bypass``).
        routes: with ``measure_routes``, what was compared since the last sync: routes, how many differ, and how many were
            computed with other experts than the rollout's.
        audit: with ``old_log_probs="rollout"``, what the losses compared (``old_log_probs``).
    """

    measuring: bool = False
    compared: bool = False
    measured: list[Any] = field(default_factory=list)
    routes: list[tuple[int, int, int]] = field(default_factory=list)
    audit: Audit = field(default_factory=Audit)
    rollout_tp: int = 1
    rollout_ep: int = 1
    stats: SyncStats | None = None
    separate: bool = False
    broken: Exception | None = None
    base: Sent | None = None
    held: str = ""
    saved: dict[Any, dict[str, int]] = field(default_factory=dict)


@dataclass(kw_only=True)
class DriverState(state.Driver):
    """State of the trainer loop, with what ``old_log_probs="rollout"`` needs (``old_log_probs``).

    Attributes:
        version: training steps of the weights of the last sync, by which verl tags samples; None before the first.
        compared: log-probs of the samples since the last log line.
        current: where the losses compare them instead, of each batch which samples are of that version, and their tokens.
        fresh: whether the policy has not been updated since the last sync.
        given_up: whether a token differed, so that the pass runs until the end of the run.
        audit: comparisons of the samples that went through the pass; None if this step's old log-probs are the pass's.
        corrected: metrics of the correction that verl applied to the step.
        unknown: keys of verl's log whose values a step without the pass does not have.
    """

    version: int | None = None
    compared: Compared = field(default_factory=Compared)
    current: list[tuple[Any, list[int]]] = field(default_factory=list)
    fresh: bool = False
    given_up: bool = False
    audit: Audit | None = None
    corrected: dict[str, float] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()


WORKER = WorkerState()
DRIVER = DriverState()


def report_key(rank: int) -> str:
    """The key under which a training worker reports a sync. verl merges the dictionaries of all ranks."""
    return f"{MARK}.{rank}"


def reset() -> None:
    """Restore the initial state. Called by ``disable()``."""
    state.reset(WORKER, DRIVER)
