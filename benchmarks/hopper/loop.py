"""Part e: GRPO in the real verl with real vLLM rollouts on one GPU, the task of ``make demo``, in each mode."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

from benchmarks.hopper.plan import Setup
from examples.common.runner import run_arm
from examples.verl.compare import MODES
from examples.verl.recipe import Recipe
from jetrl_patch.cli.report.runs import STEP_PARTS, summarize
from scripts.tables import Row

STEPS, EXACT = 8, "fp8-unified/exact"


def pieces(dry: bool) -> list[str]:
    """A dry run takes two steps in exact mode alone."""
    return [EXACT] if dry else ["bf16", EXACT, "fp8-unified/linear", "fp8-rollout"]


def measure(name: str, setup: Setup) -> list[Row]:
    """Medians over the steps without the first, which compiles. The model is tiny: this measures overhead, not speed."""
    folder = setup.scratch / "loop" / name.replace("/", "-")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").unlink(missing_ok=True)
    recipe = Recipe(steps=STEPS, held_out=64, validate_every=STEPS, device=setup.device, backend=setup.backend,
                    gpu_memory_utilization=setup.share)  # fmt: skip
    if setup.dry:
        recipe = replace(recipe, steps=2, held_out=8, validate_every=2, prompts=4, samples=2, micro_batch=8)
    run = run_arm(recipe, MODES[name], folder, lambda *_: None, lambda: None)
    times = {"step": run.seconds, "old log-probs": run.series("timing_s/old_log_prob")}
    times |= {part: run.part(part) for part in STEP_PARTS}
    later = {f"{what} s": [value for step, value in points if step > 1] for what, points in times.items()}
    row: Row = {"mode": name} | {what: statistics.median(values or [math.nan]) for what, values in later.items()}
    found = summarize(run)
    return [row | {key: found[key] for key in ("logp_abs_diff_mean", "bit_equal_fraction_min", "reward_last", "tokens")}]
