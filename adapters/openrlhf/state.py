"""State that the patches of one process share."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any

from jetrl_patch.trainer import source
from jetrl_patch.trainer.audit import Audit

#: the fix for a process that is not patched
START = "Start OpenRLHF's driver with `jetrl run`, or call jetrl_patch.enable() in it before ray.init."


@dataclass
class WorkerState(source.Worker):
    """State of an actor that holds a model (policy, reference, EMA). All of its models follow the guard (``followers``).

    Attributes:
        sources: what a weight sync sends of each ``Actor``.
        args: OpenRLHF's arguments, once this process has checked the run's settings.
        reference: whether this actor holds the reference model, which is never trained.
        stop_tokens: tokens that vLLM bans while a response is shorter than ``min_tokens``.
        placeholders: tokens of images and videos, whose logits are lowered in exact mode as in the rollout.
        report: metrics of the last weight sync, until the trainer loop takes them.
        version: number of the last weight sync; 0 before the first.
        lines: log lines of the monitor and the guard that the trainer loop has not taken yet.
        synced_at: number of optimizer steps of the policy at the last weight sync; None before the first.
        drawn: the dictionaries of the batches that the next forward passes get, which say what their tokens were drawn from.
        checked: the batch of the update in progress, if its forward pass must check the old log-probs.
        audit: the comparisons of the updates.
    """

    version: int = 0
    sources: MutableMapping[Any, source.Source] = field(default_factory=weakref.WeakKeyDictionary)
    args: Any = None
    lines: list[str] = field(default_factory=list)
    reference: bool = False
    stop_tokens: tuple[int, ...] = ()
    placeholders: tuple[int, ...] = ()
    report: dict[str, Any] | None = None
    synced_at: int | None = None
    drawn: deque[Any] = field(default_factory=deque)
    checked: Any = None
    audit: Audit = field(default_factory=Audit)


@dataclass
class DriverState(source.Driver):
    """State of the process that runs the trainer loop.

    Attributes:
        audited: the trainer loop whose processes have been compared with this one.
        version: number of the weight sync whose weights the trainer holds.
        guarded: layers that the reference model was told to move out of FP8.
        skipped: the step's samples, if the policy computes no log-probs for them; None in other steps.
        frozen: whether a frozen policy changes the number of updates of this step.
        unfinished: whether the next update began with samples of an earlier step, so that this step may have one more.
        corrected: metrics of the correction in a step without the policy's pass, until the actors report their comparisons.
        audit: the comparisons of this process.
    """

    audited: Any = None
    version: int = 0
    guarded: list[str] = field(default_factory=list)
    skipped: Any = None
    frozen: bool = False
    unfinished: bool = False
    corrected: dict[str, float] | None = None
    audit: Audit = field(default_factory=Audit)


@dataclass
class EngineState:
    """State of the actor that owns a vLLM engine: number of the weight sync that it serves, 0 before the first."""

    version: int = 0


WORKER = WorkerState()
DRIVER = DriverState()
ENGINE = EngineState()


def reset() -> None:
    """Restore the initial state. Called by ``disable()``."""
    source.reset(WORKER, DRIVER, ENGINE)
