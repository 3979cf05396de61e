"""Part g: GRPO in the real verl with real vLLM rollouts on one GPU, the task of ``make demo``, in each mode."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from benchmarks.hopper.plan import Setup
from examples.common.runner import run_arm
from examples.verl.compare import MODES
from examples.verl.recipe import Recipe
from jetrl_patch.cli.report import Run
from jetrl_patch.cli.report.runs import PARTS
from scripts.tables import Row

STEPS, EXACT = 8, "fp8-unified/exact"


def pieces(dry: bool) -> list[str]:
    """A dry run takes two steps in exact mode alone."""
    return [EXACT] if dry else [mode for mode, arm in MODES.items() if arm.router_replay == "none"]


def measure(name: str, setup: Setup) -> list[Row]:
    folder = setup.scratch / "loop" / name.replace("/", "-")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").unlink(missing_ok=True)
    recipe = Recipe(
        steps=STEPS, held_out=64, validate_every=STEPS, device=setup.device, backend=setup.backend,
        gpu_memory_utilization=setup.share,
    )  # fmt: skip
    if setup.dry:
        recipe = replace(recipe, steps=2, held_out=8, validate_every=2, prompts=4, samples=2, micro_batch=8)
    return [row(name, run_arm(recipe, MODES[name], folder, lambda *_: None, lambda: None))]


def row(mode: str, run: Run) -> Row:
    """Medians over the steps without the first, which compiles. The model is tiny: this measures overhead, not speed."""
    phases: Row = {}
    for name, timers in PARTS.items():
        by_step: Counter[int] = Counter()
        for timer in timers:
            by_step.update(dict(run.series(timer)))
        phases[f"{name} s"] = _median(by_step.items())
    return {
        "mode": mode, "steps": len(run.training_steps), "step s": _median(run.seconds), **phases,
        "old log-probs s": _median(run.series("timing_s/old_log_prob")),
        "tokens": sum(value for _, value in run.series("jetrl/tokens")),
        "bit-equal, lowest": min((share for _, share in run.series("jetrl/bit_equal_fraction")), default=""),
        "mean abs Δ": _median(run.series("jetrl/logp_abs_diff_mean")), "reward, last": run.reward[-1][1] if run.reward else "",
    }  # fmt: skip


def _median(points: Iterable[tuple[int, float]]) -> float | str:
    later = [value for step, value in points if step > 1]
    return statistics.median(later) if later else ""
