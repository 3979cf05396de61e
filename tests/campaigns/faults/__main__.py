"""Run the campaign: ``make faults``, or ``python -m tests.campaigns.faults [runs] [verl|openrlhf] [PART OF A CELL'S NAME]``.

With ``runs``, faults are injected into whole runs of a framework, otherwise into weight syncs. Verdicts are kept in
build/faults.json, and a later call continues there. Remove the file to start over. Exit status 1 if a cell is red.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.campaigns import kept
from tests.campaigns.faults.cells import TIMEOUT, Cell, cells
from tests.campaigns.faults.judge import QUESTIONS, Stage, Verdict
from tests.campaigns.faults.runs import RunCell, Setting, judge, run_cells

NAME = "faults"
SETTINGS = {"JETRL_PRECISION": "fp8-unified", "JETRL_PLATFORM": "cpu", "JETRL_SYNC_TIMEOUT": str(TIMEOUT)}


def keep(verdicts: Iterator[tuple[Cell | RunCell, Verdict]], title: str, total: int, done: dict[str, Any]) -> None:
    """Write each verdict to disk at once."""
    from rich.progress import track

    for cell, verdict in track(verdicts, title, total=total):
        done[cell.name] = {**vars(verdict), "good": verdict.good}
        kept.write(NAME, done)
        if not verdict.good:
            print(f"RED {cell.name}: {'; '.join(verdict.why)}", flush=True)


def judge_runs(chosen: list[RunCell], done: dict[str, Any]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it, and so would the runs
    with tempfile.TemporaryDirectory(prefix="jf", dir="/tmp", ignore_cleanup_errors=True) as folder:
        for framework in dict.fromkeys(cell.framework for cell in chosen):
            mine = [cell for cell in chosen if cell.framework == framework]
            setting = Setting(framework, Path(folder) / framework)
            keep(((cell, judge(setting, cell)) for cell in mine), f"runs of {framework}", len(mine), done)


def judge_syncs(chosen: list[Cell], done: dict[str, Any]) -> None:
    import ray

    import jetrl_patch
    from tests import models

    os.environ.update(SETTINGS)
    jetrl_patch.enable()
    with tempfile.TemporaryDirectory(prefix="jf", dir="/tmp", ignore_cleanup_errors=True) as folder:
        ray.init(num_cpus=4, include_dashboard=False, _temp_dir=folder, object_store_memory=80_000_000, log_to_driver=False)
        model = models.variant(Path(folder) / "model", "qwen3", 0)
        try:
            for framework in dict.fromkeys(cell.framework for cell in chosen):
                mine = [cell for cell in chosen if cell.framework == framework]
                stage = Stage(framework, model, jetrl_patch.status().config, SETTINGS)
                keep(((cell, stage.judge(cell)) for cell in mine), framework, len(mine), done)
        finally:
            ray.shutdown()


def table(chosen: Sequence[Cell | RunCell], done: dict[str, Any]) -> list[str]:
    """Rows of Markdown: how each framework, point and fault ended."""
    rows = ["| framework | point | fault | seconds | outcome |", "| --- | --- | --- | ---: | --- |"]
    for cell in chosen:
        verdict = done[cell.name]
        fine = "the sync succeeds" if isinstance(cell, Cell) else "the run goes on"
        outcome = " ".join((verdict["error"] or (fine if verdict["good"] else "none")).split())[:160].replace("[", r"\[")
        red = "" if verdict["good"] else f"**{'; '.join(q for q in QUESTIONS if not verdict['answers'].get(q))}** "
        rows.append(f"| {cell.framework} | {cell.point} | {cell.fault} | {verdict['seconds']:.1f} | {red}{outcome} |")
    return rows


def main(arguments: list[str]) -> int:
    frameworks = [word for word in arguments if word in ("verl", "openrlhf")] or ["verl", "openrlhf"]
    runs, make = "runs" in arguments, run_cells if "runs" in arguments else cells
    parts = [word for word in arguments if word not in ("verl", "openrlhf", "runs")]
    chosen: list[Any] = [cell for framework in frameworks for cell in make(framework) if all(part in cell.name for part in parts)]
    done = kept.read(NAME)
    left = [cell for cell in chosen if cell.name not in done]
    if left:
        (judge_runs if runs else judge_syncs)(left, done)
    print("\n".join(table(chosen, done)))
    red = [cell for cell in chosen if not done[cell.name]["good"]]
    slowest = max(done[cell.name]["seconds"] for cell in chosen)
    print(f"\n{len(chosen)} cells, {len(red)} red, slowest {slowest:.1f} s")
    return 1 if red else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
