"""A long run in miniature: which precisions and corrections keep what the model has learned?

Start it with ``make stability``. Every arm sees the same questions in the same order; only precision and correction
differ. ``intN-rollout`` exaggerates a rollout quantizer until its mismatch is that of a large model.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path
from statistics import fmean

from rich.table import Table

from examples.common.runner import RunFailedError
from examples.stability.arms import Arm, Setting
from examples.stability.loop import TRAINERS_ACCURACY
from examples.stability.picture import draw
from examples.stability.sweep import Job, sweep, wide_console
from jetrl_patch.cli.report import Run

ARMS = (
    Arm(precision="bf16"),
    Arm(precision="fp8-unified"),
    Arm(precision="fp8-rollout"),
    Arm(precision="int3-rollout"),
    Arm(precision="int3-rollout", correction="tis"),
    Arm(precision="int3-rollout", correction="mis"),
)
#: final steps that an arm is judged by
LAST = 60


def judged(run: Run) -> dict[str, float]:
    """Best held-out accuracy; over the last steps its mean and worst value and the mean reward; mean mismatch of the run.

    ``trainer`` is the held-out accuracy of the trainer's own weights over the last steps, NaN if it was not measured.
    """
    first = run.training_steps[-1] - LAST
    accuracy = [value for step, value in run.accuracy if step > first]
    reward = [value for step, value in run.reward if step > first]
    trainer = [value for step, value in run.series(TRAINERS_ACCURACY) if step > first]
    mismatch = [value for _, value in run.series("jetrl/logp_abs_diff_mean")]
    return {
        "best": max(value for _, value in run.accuracy),
        "last": fmean(accuracy),
        "worst": min(accuracy),
        "trainer": fmean(trainer) if trainer else math.nan,
        "reward": fmean(reward),
        "mismatch": fmean(mismatch),
    }


def table(runs: dict[Job, Run], title: str) -> Table:
    """One row per arm: means over seeds, the range over seeds, and a comparison with bf16 seed by seed."""
    found = Table(title=title)
    for name in (
        "arm",
        "seeds",
        "mean |Δlogp|",
        "best held-out",
        f"held-out, last {LAST} steps",
        "below bf16 in",
        "worst there",
        "trainer's weights there",
        "reward there",
    ):
        found.add_column(name, justify="left" if name == "arm" else "right")
    plain = {job.seed: judged(run)["last"] for job, run in runs.items() if job.arm == ARMS[0]}
    for arm in dict.fromkeys(job.arm for job in runs):
        by_seed = {job.seed: judged(run) for job, run in runs.items() if job.arm == arm}
        values = list(by_seed.values())
        below = [value["last"] < plain[seed] for seed, value in by_seed.items() if seed in plain]
        last = [v["last"] for v in values]
        mismatch = fmean(v["mismatch"] for v in values)
        found.add_row(
            arm.name,
            str(len(values)),
            f"{mismatch:.1e}" if mismatch else "0",
            f"{fmean(v['best'] for v in values):.1%}",
            _over_seeds(last),
            "–" if arm == ARMS[0] else f"{sum(below)} of {len(below)} seeds",
            f"{min(v['worst'] for v in values):.1%}",
            _over_seeds([v["trainer"] for v in values]),
            f"{fmean(v['reward'] for v in values):.3f}",
        )
    return found


def _over_seeds(values: list[float]) -> str:
    """Mean, lowest and highest value; a dash if any value is missing."""
    if not all(map(math.isfinite, values)):
        return "–"
    return f"{fmean(values):.1%} ({min(values):.1%} to {max(values):.1%})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--resume", action="store_true", help="keep the completed runs in --out")
    parser.add_argument("--out", type=Path, default=Path("outputs/stability"))
    args = parser.parse_args()
    console = wide_console()
    started = time.monotonic()
    setting = Setting(steps=args.steps, learning_rate=args.lr)
    jobs = [Job(arm=arm, seed=seed, setting=setting) for seed in args.seeds for arm in ARMS]
    try:
        runs = sweep(jobs, args.out.resolve(), console, args.at_once, args.resume)
    except RunFailedError as error:
        console.print(str(error), style="red", markup=False)
        return 1
    minutes = (time.monotonic() - started) / 60
    console.print(table(runs, f"{args.steps} steps at learning rate {args.lr:g}; {minutes:.0f} minutes"))
    unequal = [job.slug for job, run in runs.items() if job.arm.config.exact and not _exact(run)]
    console.print(f"pictures: {draw(runs, args.out / 'stability.png')}")
    console.print(f"full report: jetrl report {args.out}/*.jsonl")
    if unequal:
        console.print(f"[bold red]promise broken:[/] exact arms with unequal log-probs: {', '.join(unequal)}")
    return 1 if unequal else 0


def _exact(run: Run) -> bool:
    return all(value == 1.0 for _, value in run.series("jetrl/bit_equal_fraction"))


if __name__ == "__main__":
    sys.exit(main())
