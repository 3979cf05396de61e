"""Part g: GRPO in the real verl with real vLLM rollouts on one GPU, the task of ``make demo``, in each mode."""

from __future__ import annotations

import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.harness import Row
from benchmarks.hopper.plan import find
from benchmarks.hopper.record import Record, Table
from benchmarks.hopper.worker import Piece, Setup
from examples.common.recipe import Arm, Launch
from examples.common.runner import run_arm
from examples.verl.compare import MODES
from examples.verl.recipe import Recipe
from jetrl_patch.cli.report import Run
from jetrl_patch.cli.report.runs import PARTS

STEPS, BASELINE, TITLE = 8, "bf16", "Seconds of a step"

#: writes what verl's ``file`` logger writes, for a dry run
STAND_IN = """
import json, os
from pathlib import Path
figures = {"critic/score/mean": 0.5, "timing_s/step": 4.0, "timing_s/gen": 2.0, "timing_s/update_weights": 0.5,
           "timing_s/update_actor": 1.0, "jetrl/tokens": 100, "jetrl/bit_equal_fraction": 1.0}
lines = [json.dumps({"step": step, "data": figures}) for step in range(1, %d)]
Path(os.environ["VERL_FILE_LOGGER_PATH"]).write_text("\\n".join(lines) + "\\n")
"""


class DryRecipe(Recipe):
    """Starts a stand-in for the trainer in the environment of a run."""

    def launch(self, arm: Arm, folder: Path, temporary: Path, log: Path) -> Launch:
        return replace(super().launch(arm, folder, temporary, log), command=[sys.executable, "-c", STAND_IN % (self.steps + 1)])


def pieces(setup: Setup) -> Iterator[Piece]:
    for mode, arm in MODES.items():
        if arm.router_replay == "none":
            yield Piece(TITLE, mode, partial(_run, setup, mode), 120)


def _run(setup: Setup, mode: str) -> list[Row]:
    folder = (setup.scratch / "loop" / mode.replace("/", "-")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").unlink(missing_ok=True)
    kind = DryRecipe if setup.dry else Recipe
    recipe = kind(
        steps=3 if setup.dry else STEPS, held_out=64, validate_every=STEPS, device=setup.device, backend=setup.backend,  # type: ignore[arg-type]
        gpu_memory_utilization=find(["loop"])[0].share,
    )  # fmt: skip
    return [row(mode, run_arm(recipe, MODES[mode], folder, lambda *_: None, lambda: None))]


def row(mode: str, run: Run) -> Row:
    """Medians over the steps without the first, which compiles."""
    phases: Row = {}
    for name, timers in PARTS.items():
        by_step: Counter[int] = Counter()
        for timer in timers:
            by_step.update(dict(run.series(timer)))
        phases[f"{name} s"] = _median(by_step.items())
    equal = [share for _, share in run.series("jetrl/bit_equal_fraction")]
    return {
        "mode": mode, "steps": len(run.training_steps), "step s": _median(run.seconds), **phases,
        "old log-probs s": _median(run.series("timing_s/old_log_prob")),
        "tokens": sum(value for _, value in run.series("jetrl/tokens")), "bit-equal, lowest": min(equal, default=""),
        "mean abs Δ": _median(run.series("jetrl/logp_abs_diff_mean")), "reward, last": run.reward[-1][1] if run.reward else "",
    }  # fmt: skip


def _median(points: Iterable[tuple[int, float]]) -> float | str:
    later = [value for step, value in points if step > 1]
    return statistics.median(later) if later else ""


def derive(record: Record) -> list[Table]:
    rows = {row["mode"]: row for row in record.tables().get(TITLE, [])}
    base = {key: value for key, value in rows.get(BASELINE, {}).items() if key.endswith(" s") and value}
    table = [
        {"mode": mode, **{f"{key[:-2]}, BF16 / this": base[key] / mine[key] for key in base if mine[key]}}
        for mode, mine in rows.items() if base
    ]  # fmt: skip
    note = "A model of 2.4 million parameters: what is measured is overhead, not speed."
    return [("Time of each phase against BF16", table, note if table else "")]
