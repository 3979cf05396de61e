"""What the patches of one process tell each other."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

from jetrl_patch.precision.loss_scale import LossScale


@dataclass
class WorkerState:
    """In an actor that holds a model (policy, reference, EMA).

    Attributes:
        args: OpenRLHF's arguments, once this process is known to belong to a run of ours.
        reference: whether this is the actor of the reference model, which is never trained.
        stop_tokens: tokens that vLLM bans while a response is shorter than ``min_tokens``.
        report: figures of the last weight sync.
        version: number of the last weight sync; 0 before the first.
        loss_scale: of the optimizer, in a mode that has one.
        models: what was prepared in this process (policy and EMA, or the reference), for the precision guard.
        lines: of the monitor and the guard, for the log of the trainer loop, which has not asked for them yet.
    """

    loss_scale: LossScale = field(default_factory=LossScale)
    version: int = 0
    args: Any = None
    models: list[weakref.ref[Any]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    reference: bool = False
    stop_tokens: tuple[int, ...] = ()
    report: dict[str, Any] | None = None


@dataclass
class DriverState:
    """In the process that runs the trainer loop: figures that wait for the next line of its log, and the number of the
    weight sync whose weights the trainer holds. ``guarded`` are the layers that the reference was told to follow in.
    """

    metrics: dict[str, Any] = field(default_factory=dict)
    version: int = 0
    guarded: list[str] = field(default_factory=list)


@dataclass
class EngineState:
    """In the actor that owns a vLLM engine: the number of the weight sync that it serves; 0 before the first."""

    version: int = 0


WORKER = WorkerState()
DRIVER = DriverState()
ENGINE = EngineState()


def reset() -> None:
    """As at start; called by ``disable()``."""
    WORKER.__init__()  # type: ignore[misc]
    DRIVER.__init__()  # type: ignore[misc]
    ENGINE.__init__()  # type: ignore[misc]
