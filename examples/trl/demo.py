"""One run of TRL's real GRPOTrainer with real vLLM rollouts in unified FP8: it learns sums in words and stays bit-equal.

Start it with ``make demo`` or ``python -m examples.trl.demo``. ``--device cuda`` uses a GPU and your own vllm and trl.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from examples.common.recipe import TASKS, Arm
from examples.common.show import run_all
from examples.trl.recipe import Recipe


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--precision", default="fp8-unified", choices=("bf16", "fp8-rollout", "int8-rollout", "fp8-unified")
    )
    parser.add_argument("--align", default=None, choices=("exact", "linear"), help="fp8-unified only; default exact")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--device", default=os.environ.get("DEVICE", "cpu"), choices=("cpu", "cuda"))
    parser.add_argument("--out", type=Path, default=Path("outputs/demo"))
    args = parser.parse_args()
    arm = Arm(precision=args.precision, align=args.align, seed=args.seed)
    recipe = Recipe.of(TASKS["words"], steps=args.steps, device=args.device)
    subtitle = f"TRL's GRPO with a colocated vLLM on {args.device.upper()}: {recipe.task.title}, {recipe.steps} steps."
    return run_all(recipe, [arm], args.out.resolve(), f"One run in {arm.name}", subtitle)


if __name__ == "__main__":
    sys.exit(main())
