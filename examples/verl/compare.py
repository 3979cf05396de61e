"""Four modes on the same data and seeds: BF16, FP8 rollout, unified FP8 with shared linears, unified FP8 exact.

Run it by ``make compare`` or ``python -m examples.verl.compare``. ``make compare-moe`` runs them with a mixture of experts, which
its first run makes of the dense model, and measures its routes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from dataclasses import replace
from pathlib import Path

from examples.common.recipe import Arm
from examples.common.show import console, run_all
from examples.verl.recipe import Recipe
from examples.words.mixture import mixture
from jetrl_patch.report import read_runs

ARMS = (("bf16", None), ("fp8-rollout", None), ("fp8-unified", "linear"), ("fp8-unified", "exact"))
MODES = {precision if align is None else f"{precision}/{align}": (precision, align) for precision, align in ARMS}


def main() -> int:
    defaults = Recipe()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--steps", type=int, default=defaults.steps)
    parser.add_argument("--device", default=os.environ.get("DEVICE", "cpu"), choices=("cpu", "cuda"))
    parser.add_argument("--experts", type=int, default=0, help="train a mixture with this many experts in each block")
    parser.add_argument("--out", type=Path, default=Path("outputs/compare"))
    args = parser.parse_args()
    # The exact ops have not run on a GPU yet.
    modes = [MODES[name] for name in args.modes if args.device == "cpu" or MODES[name][1] != "exact"]
    arms = [Arm(precision=p, align=a, seed=seed) for p, a in modes for seed in args.seeds]
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
    """Print how long a step of each run took, and the forward pass for old log-probs in it: medians over the training steps."""
    for run in read_runs(metrics):
        steps, passes = dict(run.seconds), dict(run.series("timing_s/old_log_prob"))
        share = statistics.median(passes.get(number, 0.0) / seconds for number, seconds in steps.items())
        median = statistics.median(steps.values())
        console.print(f"{run.label}, seed {run.seed}: {median:.2f} s a step, {100 * share:.1f}% of it for old log-probs")


if __name__ == "__main__":
    sys.exit(main())
