"""One run of the real OpenRLHF trainer with real vLLM rollouts on a CPU, in unified FP8 and bit-equal.

Run it with ``make demo-openrlhf`` or ``python -m examples.openrlhf.demo``. ``make demo-openrlhf MODEL=smollm2`` trains a real
pretrained model on sums of reasoning-gym.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from examples.common.recipe import TASKS, Arm
from examples.common.show import run_all
from examples.openrlhf.recipe import Recipe
from examples.words.mixture import mixture

ARMS = (("bf16", None), ("fp8-rollout", None), ("fp8-unified", "linear"), ("fp8-unified", "exact"))


def main() -> int:
    defaults = Recipe()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--precision", default="fp8-unified", choices=("bf16", "fp8-rollout", "int8-rollout", "fp8-unified")
    )
    parser.add_argument("--align", default=None, choices=("exact", "linear"), help="fp8-unified only; default exact")
    parser.add_argument("--compare", action="store_true", help="all four modes, one after the other")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="words", choices=TASKS)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--zero-stage", type=int, default=defaults.zero_stage, choices=(0, 1, 2, 3))
    parser.add_argument("--actors", type=int, default=defaults.actors, help="ranks of the policy")
    parser.add_argument("--experts", type=int, default=0, help="train a mixture with this many experts in each block")
    parser.add_argument("--out", type=Path, default=Path("outputs/demo-openrlhf"))
    args = parser.parse_args()
    if args.experts and args.model != "words":
        parser.error(f"--experts makes a mixture of the words model, found --model {args.model}. Drop one of the two options.")
    modes = ARMS if args.compare else [(args.precision, args.align)]
    arms = [Arm(precision=precision, align=align, seed=args.seed) for precision, align in modes]
    out = args.out.resolve()
    recipe = Recipe.of(TASKS[args.model], steps=args.steps, zero_stage=args.zero_stage, actors=args.actors)
    if args.experts:
        recipe = replace(recipe, model=mixture(out.parent / f"words-{args.experts}-experts", args.experts))
    subtitle = (
        f"Real OpenRLHF with real vLLM rollouts on a CPU, ZeRO-{recipe.zero_stage}, {recipe.actors} policy rank(s): "
        f"{recipe.task.title}, {recipe.steps} steps."
    )
    title = "OpenRLHF in four modes" if args.compare else f"One OpenRLHF run in {arms[0].name}"
    return run_all(recipe, arms, out, title, subtitle)


if __name__ == "__main__":
    sys.exit(main())
