"""Many runs, a few at a time, each in a process group of its own that leaves nothing behind."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from examples.common.processes import Group, temporary_folder
from examples.common.recipe import Recipe, environment
from examples.common.runner import RunFailedError, ending
from examples.stability.arms import Arm, Setting
from examples.stability.loop import States
from jetrl_patch.cli.report import Run, read_runs

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run of one arm.

    Attributes:
        title: names the setting where a sweep has several.
        export: the folder that gets the policy at each validation, as in ``loop.run``.
    """

    arm: Arm
    seed: int
    setting: Setting
    title: str = ""
    export: Path | None = None

    @property
    def slug(self) -> str:
        return f"{self.title and self.title + '-'}{self.arm.slug}-seed{self.seed}"

    def command(self, out: Path, resume: bool = False) -> list[str]:
        return [
            sys.executable, "-m", "examples.stability.loop", *self.arm.arguments(), "--seed", str(self.seed),
            "--out", str(out), *self.setting.arguments(), *["--resume"] * resume,
            *([] if self.export is None else ["--export", str(self.export)]),
        ]  # fmt: skip


def sweep(
    jobs: Sequence[Job], folder: Path, console: Console, at_once: int = 2, resume: bool = False,
    on_end: Callable[[Job, Run], None] = lambda _job, _run: None,
) -> dict[Job, Run]:
    """Run all jobs; ``folder/<job>.jsonl`` receives a run's metrics, ``folder/logs`` its output.

    Args:
        resume: keep earlier runs of the same setting that completed all steps, and go on with unfinished ones.
        on_end: called with each run as soon as it is there.

    Raises:
        RunFailedError: a run failed; the others in progress have been ended.
    """
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    found = {job: _result(job, folder, 0) for job in jobs if resume and is_whole(job, folder)}
    for job, run in found.items():
        on_end(job, run)
    waiting, running = [job for job in jobs if job not in found], dict[Job, Group]()
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=30), MofNCompleteColumn(), TimeElapsedColumn())
    with temporary_folder() as temporary, Progress(*columns, console=console) as progress:
        bar = progress.add_task("runs", total=len(jobs), completed=len(found))
        try:
            while waiting or running:
                while waiting and len(running) < at_once:
                    job = waiting.pop(0)
                    log = folder / "logs" / f"{job.slug}.log"
                    running[job] = Group(job.command(folder / f"{job.slug}.jsonl", resume), _environment(temporary), ROOT, log)
                for job, group in list(running.items()):
                    status = group.leader.poll()
                    if status is None:
                        continue
                    group.end()
                    del running[job]
                    found[job] = _result(job, folder, status)
                    on_end(job, found[job])
                    progress.update(bar, advance=1, description=job.slug)
                time.sleep(0.2)
        finally:
            for group in running.values():
                group.end()
    return {job: found[job] for job in jobs}


def wide_console() -> Console:
    """A console that is as wide as the tables if the output is not a terminal."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 170)


def is_whole(job: Job, folder: Path) -> bool:
    """Whether ``folder`` holds a run of the job, in its setting, that completed all steps."""
    path = folder / f"{job.slug}.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    if len(lines) != job.setting.steps + 1:
        return False
    last = json.loads(lines[-1])
    return bool((last["step"], last.get("setting")) == (job.setting.steps, job.setting.changed()))


def _result(job: Job, folder: Path, status: int) -> Run:
    if status != 0:
        log = folder / "logs" / f"{job.slug}.log"
        raise RunFailedError(f"{job.slug} ended with status {status}; see {log}\n{ending(log)}")
    States(folder / f"{job.slug}.jsonl").remove()
    (run,) = read_runs(folder / f"{job.slug}.jsonl")
    return run


def _environment(temporary: Path) -> dict[str, str]:
    # the engine lives in the loop's own process, and all runs of the sweep share one terminal
    return {**environment(Recipe(), temporary), "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
