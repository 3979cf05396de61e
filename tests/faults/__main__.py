"""Run the campaign: ``make faults``, or ``python -m tests.faults [verl|openrlhf] [PART OF A CELL'S NAME]``.

What has been judged is kept in build/faults.json: a later call goes on there. Remove the file to begin anew. Exit status 1 if a
cell is red.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.faults.cells import TIMEOUT, Cell, cells
from tests.faults.judge import QUESTIONS, Stage

DONE = Path(__file__).parents[2] / "build" / "faults.json"
SETTINGS = {"JETRL_PRECISION": "fp8-unified", "JETRL_PLATFORM": "cpu", "JETRL_SYNC_TIMEOUT": str(TIMEOUT)}


def judged(framework: str, chosen: list[Cell], model: str) -> Iterator[tuple[Cell, dict[str, Any]]]:
    import jetrl_patch

    stage = Stage(framework, model, jetrl_patch.status().config, {**SETTINGS, "PYTHONPATH": os.getcwd()})
    for cell in chosen:
        verdict = stage.judge(cell)
        yield cell, {**vars(verdict), "good": verdict.good}


def run(chosen: list[Cell], done: dict[str, Any]) -> None:
    import ray
    from rich.progress import track

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
                for cell, verdict in track(judged(framework, mine, model), framework, total=len(mine)):
                    done[cell.name] = verdict
                    DONE.parent.mkdir(exist_ok=True)
                    DONE.write_text(json.dumps(done, indent=1))
                    if not verdict["good"]:
                        print(f"RED {cell.name}: {'; '.join(verdict['why'])}", flush=True)
        finally:
            ray.shutdown()


def table(chosen: list[Cell], done: dict[str, Any]) -> list[str]:
    """Rows of Markdown: of each framework, point and fault how it ended."""
    rows = ["| framework | point | fault | seconds | outcome |", "| --- | --- | --- | ---: | --- |"]
    for cell in chosen:
        verdict = done[cell.name]
        outcome = " ".join((verdict["error"] or "the sync succeeds").split())[:160]
        red = "" if verdict["good"] else f"**{'; '.join(q for q in QUESTIONS if not verdict['answers'].get(q))}** "
        rows.append(f"| {cell.framework} | {cell.point} | {cell.fault} | {verdict['seconds']:.1f} | {red}{outcome} |")
    return rows


def main(arguments: list[str]) -> int:
    frameworks = [word for word in arguments if word in ("verl", "openrlhf")] or ["verl", "openrlhf"]
    parts = [word for word in arguments if word not in ("verl", "openrlhf")]
    chosen = [cell for framework in frameworks for cell in cells(framework) if all(part in cell.name for part in parts)]
    done: dict[str, Any] = json.loads(DONE.read_text()) if DONE.exists() else {}
    left = [cell for cell in chosen if cell.name not in done]
    if left:
        run(left, done)
    print("\n".join(table(chosen, done)))
    red = [cell for cell in chosen if not done[cell.name]["good"]]
    slowest = max(done[cell.name]["seconds"] for cell in chosen)
    print(f"\n{len(chosen)} cells, {len(red)} red, slowest {slowest:.1f} s")
    return 1 if red else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
