"""Four modes on the same data and seeds: BF16, FP8 rollout, unified FP8 with shared linears, unified FP8 exact.

Run it with ``make compare`` or ``python -m examples.verl.compare``. ``make compare-moe`` trains a mixture of experts instead,
which its first run makes from the dense model. It also measures routes, and adds an FP8 rollout whose routes the trainer replays
(R3).
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from examples.common.recipe import Arm
from examples.common.show import console, run_all
from examples.verl.recipe import Recipe
from examples.words.mixture import mixture
from jetrl_patch.cli.report import read_runs

MODES = {
    "bf16": Arm(precision="bf16"),
    "fp8-rollout": Arm(precision="fp8-rollout"),
    "fp8-rollout+R3": Arm(precision="fp8-rollout", router_replay="R3"),
    "fp8-unified/linear": Arm(precision="fp8-unified", align="linear"),
    "fp8-unified/exact": Arm(precision="fp8-unified", align="exact"),
}


def chosen(names: Sequence[str] | None, experts: int, seeds: Sequence[int]) -> list[Arm]:
    """The arms of a comparison; None means all. A dense model has no routes to replay."""
    modes = [mode for mode in (MODES[name] for name in names or MODES) if experts or mode.router_replay == "none"]
    return [replace(mode, seed=seed) for mode in modes for seed in seeds]


def main() -> int:
    defaults = Recipe()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--modes", nargs="+", choices=MODES)
    parser.add_argument("--steps", type=int, default=defaults.steps)
    parser.add_argument("--device", default=os.environ.get("DEVICE", "cpu"), choices=("cpu", "cuda"))
    parser.add_argument("--experts", type=int, default=0, help="train a mixture with this many experts in each block")
    parser.add_argument("--out", type=Path, default=Path("outputs/compare"))
    args = parser.parse_args()
    if not args.experts and any(MODES[name].router_replay != "none" for name in args.modes or ()):
        parser.error("fp8-rollout+R3 replays the routes of a mixture of experts, found a dense model. Add --experts 8.")
    arms = chosen(args.modes, args.experts, args.seeds)
    out = args.out.resolve()
    recipe = Recipe(steps=args.steps, device=args.device)
    if args.experts:
        model = mixture(out.parent / f"words-{args.experts}-experts", args.experts)
        recipe = replace(recipe, model=model, measure_routes=True, prompts=8, held_out=128, validate_every=args.steps)
    kind = f"a mixture of {args.experts} experts, " if args.experts else ""
    subtitle = (
        f"Real verl GRPO with real vLLM rollouts on {args.device.upper()}: {kind}sums in words, {recipe.steps} steps, "
        f"{len(args.seeds)} seeds, the same questions in every arm."
    )
    status = run_all(recipe, arms, out, "Unified FP8 and its alternatives", subtitle)
    if status == 0:
        print_passes(out / "metrics.jsonl")
    return status


def print_passes(metrics: Path) -> None:
    """Print each run's seconds per step and the share of the pass for old log-probs: medians over the training steps."""
    for run in read_runs(metrics):
        steps, passes = dict(run.seconds), dict(run.series("timing_s/old_log_prob"))
        share = statistics.median(passes.get(number, 0.0) / seconds for number, seconds in steps.items())
        median = statistics.median(steps.values())
        console.print(f"{run.label}, seed {run.seed}: {median:.2f} s a step, {100 * share:.1f}% of it for old log-probs")


if __name__ == "__main__":
    sys.exit(main())
