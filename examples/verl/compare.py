"""Four modes on the same data and seeds: BF16, FP8 rollout, unified FP8 with shared linears, unified FP8 exact.

Run it by ``make compare`` or ``python -m examples.verl.compare``.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from examples.common.recipe import Arm
from examples.common.show import run_all
from examples.verl.recipe import Recipe

ARMS = (("bf16", None), ("fp8-rollout", None), ("fp8-unified", "linear"), ("fp8-unified", "exact"))


def main() -> int:
    defaults = Recipe()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--steps", type=int, default=defaults.steps)
    parser.add_argument("--device", default=os.environ.get("DEVICE", "cpu"), choices=("cpu", "cuda"))
    parser.add_argument("--out", type=Path, default=Path("outputs/compare"))
    args = parser.parse_args()
    # The exact ops have not run on a GPU yet.
    modes = [mode for mode in ARMS if args.device == "cpu" or mode[1] != "exact"]
    arms = [Arm(precision=p, align=a, seed=seed) for p, a in modes for seed in args.seeds]
    recipe = Recipe(steps=args.steps, device=args.device)
    subtitle = (
        f"Real verl GRPO with real vLLM rollouts on {args.device.upper()}: sums in words, {recipe.steps} steps, "
        f"{len(args.seeds)} seeds, the same questions in every arm."
    )
    return run_all(recipe, arms, args.out.resolve(), "Unified FP8 and its alternatives", subtitle)


if __name__ == "__main__":
    sys.exit(main())
