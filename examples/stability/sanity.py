"""Precision-RL's sanity test (arXiv 2510.26788): can each algorithm learn learnable questions, in each precision?

Train only on questions that the initial model solves in 20 to 80% of its answers. An algorithm passes if its training
accuracy exceeds 95%. Start it with ``make sanity``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.table import Table

from examples.common.runner import RunFailedError
from examples.stability.arms import Arm, Setting
from examples.stability.sweep import Job, sweep, wide_console
from jetrl_patch.cli.report import Run

Story = dict[int, dict[str, Any]]

PASS = 0.95
#: steps over which the training accuracy is averaged
WINDOW = 10
PRECISIONS = ("bf16", "fp8-rollout", "int8-rollout", "fp8-unified")
#: correction and objective of each algorithm, under Precision-RL's names where it has one
ALGORITHMS = {
    "PPO (GRPO)": ("none", "ppo"),
    "PPO-Token-TIS": ("tis", "ppo"),
    "PPO-Seq-MIS": ("seq-mis", "ppo"),
    "PG-Seq-IS": ("none", "pg-seq-is"),
    "GSPO": ("none", "gspo"),
}
#: these differ only in their importance weights, so they coincide if every weight is exactly 1
ONE_POLICY = ("PPO (GRPO)", "PPO-Token-TIS", "PPO-Seq-MIS", "PG-Seq-IS")


def peak(run: Run) -> float:
    """The highest training accuracy over ``WINDOW`` consecutive steps."""
    rewards = [value for _, value in run.reward]
    return max(fmean(rewards[i : i + WINDOW]) for i in range(len(rewards) - WINDOW + 1))


def end(run: Run) -> float:
    """The training accuracy of the last ``WINDOW`` steps."""
    return fmean(value for _, value in run.reward[-WINDOW:])


def table(runs: dict[Job, Run], title: str) -> Table:
    """Algorithms by precisions: the lowest peak over seeds and the mean final accuracy; a pass in green."""
    found = Table(title=title)
    found.add_column("training accuracy, lowest peak → mean end")
    for precision in PRECISIONS:
        found.add_column(precision, justify="right")
    for name, (correction, objective) in ALGORITHMS.items():
        cells = []
        for precision in PRECISIONS:
            arm = Arm(precision=precision, correction=correction, objective=objective)
            mine = [run for job, run in runs.items() if job.arm == arm]
            if not mine:
                cells.append("")
                continue
            lowest = min(map(peak, mine))
            mark = "[green]passes[/] " if lowest > PASS else ""
            cells.append(f"{mark}{lowest:.1%} → {fmean(map(end, mine)):.1%}")
        found.add_row(name, *cells)
    return found


def one_run(runs: dict[Job, Run], precision: str) -> list[bool]:
    """For each seed, whether the algorithms of ``ONE_POLICY`` logged the same metrics bit for bit, apart from timings."""
    arms = {ALGORITHMS[name] for name in ONE_POLICY}
    stories: dict[int, list[Story]] = {}
    for job, run in runs.items():
        if job.arm.precision == precision and (job.arm.correction, job.arm.objective) in arms:
            stories.setdefault(job.seed, []).append(_story(run))
    return [all(story == mine[0] for story in mine) for mine in stories.values()]


def _story(run: Run) -> Story:
    return {
        step: {name: value for name, value in data.items() if not name.startswith("timing_s/")}
        for step, data in run.steps.items()
    }


def jobs(seeds: Sequence[int], steps: int, learning_rate: float, pool: Path) -> list[Job]:
    """Every algorithm in every precision."""
    return [
        Job(
            arm=Arm(precision=precision, correction=correction, objective=objective),
            seed=seed,
            setting=Setting(steps=steps, learning_rate=learning_rate, pool=pool),
        )
        for seed in seeds
        for correction, objective in ALGORITHMS.values()
        for precision in PRECISIONS
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--resume", action="store_true", help="keep the completed runs in --out")
    parser.add_argument("--out", type=Path, default=Path("outputs/sanity"))
    args = parser.parse_args()
    console, started, folder = wide_console(), time.monotonic(), args.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    pool = folder / "pool.json"
    subprocess.run(
        [sys.executable, "-m", "examples.stability.pool", "--out", str(pool)], check=True, capture_output=True
    )
    console.print(f"{len(json.loads(pool.read_text()))} questions that the initial model solves 20 to 80% of the time")
    try:
        runs = sweep(jobs(args.seeds, args.steps, args.lr, pool), folder, console, args.at_once, args.resume)
    except RunFailedError as error:
        console.print(str(error), style="red", markup=False)
        return 1
    minutes = (time.monotonic() - started) / 60
    console.print(
        table(runs, f"{args.steps} steps, {len(args.seeds)} seeds, passes above {PASS:.0%}; {minutes:.0f} minutes")
    )
    same = {precision: one_run(runs, precision) for precision in PRECISIONS}
    for precision, seeds in same.items():
        console.print(f"{precision}: {', '.join(ONE_POLICY)} are bit-equal runs in {sum(seeds)} of {len(seeds)} seeds")
    return 0 if all(same["fp8-unified"]) else 1


if __name__ == "__main__":
    sys.exit(main())
