"""State that the patches of one process share, and the name of the place where it runs."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field
from typing import Any

from jetrl_patch.trainer import source
from jetrl_patch.trainer.audit import Audit

# ---- Name the place where a process runs, for reports and errors ---------------------------------

def where() -> str:
    """Return the host name, and the raylet that started the process: several Ray nodes may share a host."""
    raylet = os.environ.get("RAY_RAYLET_PID")
    return f"{socket.gethostname()} (raylet {raylet})" if raylet else socket.gethostname()


# ---- State that the patches of one process share -------------------------------------------------

@dataclass
class WorkerState(source.Worker):
    """State of an actor that holds a model (policy, reference, EMA). All of its models are ``followers`` of the guard.

    Attributes:
        args: OpenRLHF's arguments, set once this process has checked the run's settings.
        reference: whether this actor holds the reference model, which is never trained.
        stop_tokens: tokens that vLLM bans while a response is shorter than ``min_tokens``.
        report: metrics of the last weight sync, until the trainer loop takes them.
        version: number of the last weight sync; 0 before the first.
        lines: lines of the monitor and the guard that the trainer loop has not yet taken for its log.
        synced_at: the policy's optimizer steps at the last weight sync; None before the first.
        checked: the batch of the update in progress, while its forward pass can check its old log-probs.
        audit: what the updates compared.
    """

    version: int = 0
    args: Any = None
    lines: list[str] = field(default_factory=list)
    reference: bool = False
    stop_tokens: tuple[int, ...] = ()
    report: dict[str, Any] | None = None
    synced_at: int | None = None
    checked: Any = None
    audit: Audit = field(default_factory=Audit)


@dataclass
class DriverState(source.Driver):
    """State of the process that runs the trainer loop.

    Attributes:
        version: number of the weight sync whose weights the trainer holds.
        guarded: layers that the reference was told to move out of FP8.
        skipped: the step's samples if the policy computes no log-probs for them; None in other steps.
        frozen: whether this step has another number of updates than its samples, because the policy is or was frozen.
        corrected: metrics of the correction in such a step, until the actors report what they compared.
        audit: what was compared in this process.
    """

    version: int = 0
    guarded: list[str] = field(default_factory=list)
    skipped: Any = None
    frozen: bool = False
    corrected: dict[str, float] | None = None
    audit: Audit = field(default_factory=Audit)


@dataclass
class EngineState:
    """State of the actor that owns a vLLM engine: the number of the weight sync that it serves; 0 before the first."""

    version: int = 0


WORKER = WorkerState()
DRIVER = DriverState()
ENGINE = EngineState()


def reset() -> None:
    """Restore the initial state. Called by ``disable()``."""
    source.reset(WORKER, DRIVER, ENGINE)
