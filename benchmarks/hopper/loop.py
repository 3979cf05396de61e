"""Part g: GRPO in the real verl with real vLLM rollouts on one GPU, the task of ``make demo``, in each mode."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial

from benchmarks.hopper.plan import find
from benchmarks.hopper.record import Piece, Record, Setup, Table
from examples.common.runner import run_arm
from examples.verl.compare import MODES
from examples.verl.recipe import Recipe
from jetrl_patch.cli.report import Run
from jetrl_patch.cli.report.runs import PARTS
from scripts.tables import Row

STEPS, BASELINE, EXACT, TITLE = 8, "bf16", "fp8-unified/exact", "Seconds of a step"


def pieces(setup: Setup) -> Iterator[Piece]:
    """A dry run takes two steps in exact mode alone."""
    for mode, arm in MODES.items():
        if arm.router_replay == "none" and (mode == EXACT or not setup.dry):
            yield Piece(TITLE, mode, partial(_run, setup, mode))


def _run(setup: Setup, mode: str) -> list[Row]:
    folder = (setup.scratch / "loop" / mode.replace("/", "-")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").unlink(missing_ok=True)
    recipe = Recipe(
        steps=STEPS, held_out=64, validate_every=STEPS, device=setup.device, backend=setup.backend,  # type: ignore[arg-type]
        gpu_memory_utilization=find(["loop"])[0].share,
    )  # fmt: skip
    if setup.dry:
        recipe = replace(recipe, steps=2, held_out=8, validate_every=2, prompts=4, samples=2, micro_batch=8)
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
    note = "A model of 2.4 million parameters: this measures overhead, not speed."
    return [("Time of each phase relative to BF16", table, note if table else "")]
