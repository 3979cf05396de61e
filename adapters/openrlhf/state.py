"""What the patches of one process tell each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from jetrl_patch.trainer import state


@dataclass
class WorkerState(state.Worker):
    """In an actor that holds a model (policy, reference, EMA). All of its models are ``followers`` of the guard.

    Attributes:
        args: OpenRLHF's arguments, once this process is known to belong to a run of ours.
        reference: whether this is the actor of the reference model, which is never trained.
        stop_tokens: tokens that vLLM bans while a response is shorter than ``min_tokens``.
        report: figures of the last weight sync.
        version: number of the last weight sync; 0 before the first.
        lines: of the monitor and the guard, for the log of the trainer loop, which has not asked for them yet.
    """

    version: int = 0
    args: Any = None
    lines: list[str] = field(default_factory=list)
    reference: bool = False
    stop_tokens: tuple[int, ...] = ()
    report: dict[str, Any] | None = None


@dataclass
class DriverState(state.Driver):
    """In the process that runs the trainer loop: also the number of the weight sync whose weights the trainer holds.

    ``guarded`` are the layers that the reference was told to follow in.
    """

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
    state.reset(WORKER, DRIVER, ENGINE)
