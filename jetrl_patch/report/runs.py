"""What a run left behind: ``metrics.jsonl`` read into one ``Run`` per arm and seed, and its summary.

A line of the file is one JSON object of one of two kinds::

    {"precision": "fp8-unified", "align": "exact", "seed": 0, "step": 3, "data": {"jetrl/logp_abs_diff_max": 0.0, ...}}
    {"precision": "fp8-unified", "align": "exact", "seed": 0, "final": {"peak_memory_bytes": ..., "versions": {...}}}

``data`` is what the framework's own logger wrote for that step, names and all.  ``final`` may also hold ``answers``, a
list of ``{"question", "before", "before_right", "after", "after_right"}``: what the model said before and after.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

from jetrl_patch.errors import JetrlError

__all__ = ["SUMMARY_KEYS", "ReportError", "Run", "read_runs", "summarize"]

SUMMARY_KEYS = (
    "precision", "align", "seed", "steps", "tokens", "accuracy_first", "accuracy_last", "logp_abs_diff_mean",
    "logp_abs_diff_max", "bit_equal_fraction_min", "k3_kl_mean", "sync_bytes", "sync_bytes_bf16", "sync_seconds_mean",
    "step_seconds_median", "peak_memory_bytes", "quantized_layers", "versions",
)  # fmt: skip

#: names of verl and of OpenRLHF for the same figure
REWARD = ("critic/score/mean", "rollout/reward_mean")
SECONDS = ("timing_s/step", "timing/step_total")  # verl times validation apart from the step
ACCURACY = re.compile(r"val-core/.*/mean@\d+|eval_.*_pass1")


class ReportError(JetrlError, ValueError):
    """A metrics file that cannot be reported on."""


@dataclass
class Run:
    """One arm with one seed: ``steps`` maps a step to the framework's metrics of that step."""

    precision: str
    align: str
    seed: int
    steps: dict[int, dict[str, Any]] = field(default_factory=dict)
    final: dict[str, Any] = field(default_factory=dict)

    @property
    def arm(self) -> str:
        """The name people see: ``bf16``, ``fp8-rollout``, ``fp8-unified/exact``."""
        return self.precision if self.align in ("", "none") else f"{self.precision}/{self.align}"

    @property
    def training_steps(self) -> list[int]:
        """The steps that trained, in order: a validation before the first one is not among them."""
        return sorted(step for step, data in self.steps.items() if {*REWARD, "jetrl/tokens"} & set(data))

    def series(self, name: str) -> list[tuple[int, float]]:
        """``(step, value)`` of one metric, ascending, without the steps that lack it; null, as NaN is written, is NaN."""
        pairs = ((step, number(self.steps[step][name])) for step in sorted(self.steps) if name in self.steps[step])
        return [(step, value) for step, value in pairs if value is not None]

    @property
    def reward(self) -> list[tuple[int, float]]:
        """``(step, mean reward of its samples)``."""
        return next((found for name in REWARD if (found := self.series(name))), [])

    @property
    def seconds(self) -> list[tuple[int, float]]:
        """``(step, seconds it took)``."""
        return next((found for name in SECONDS if (found := self.series(name))), [])

    @property
    def accuracy(self) -> list[tuple[int, float]]:
        """``(step, held-out accuracy)``: the mean over data sources of verl's ``val-core/<source>/…/mean@n`` or OpenRLHF's
        ``eval_<source>_pass1``.
        """
        found: list[tuple[int, float]] = []
        for step in sorted(self.steps):
            values = [
                value
                for name, raw in self.steps[step].items()
                if ACCURACY.fullmatch(name) and (value := number(raw)) is not None
            ]
            if values:
                found.append((step, fmean(values)))
        return found


def number(value: object) -> float | None:
    """``value`` as a float, NaN and infinities included (JSON's null is NaN); None when it is no number."""
    if value is None:
        return math.nan
    return None if isinstance(value, bool) or not isinstance(value, int | float) else float(value)


def read_runs(path: Path) -> list[Run]:
    """The runs of one ``metrics.jsonl``, in order of appearance.

    A last line that was cut off (the writer was killed) is left out. Anything else that is wrong raises.

    Raises:
        ReportError: the file is missing, holds no step, or a line is not what the module says; with its number.
    """
    if not path.is_file():
        raise ReportError(f"{path}: asked for a metrics file, found none; give the metrics.jsonl of a run")
    runs: dict[tuple[str, str, int], Run] = {}
    lines = path.read_text(encoding="utf-8").split("\n")
    for i, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            if i == len(lines):  # no newline after it: cut off while being written
                continue
            raise ReportError(f"{path}, line {i}: not JSON ({error.msg}); remove the line or run again") from None
        _add(runs, record, where=f"{path}, line {i}")
    if not any(run.steps for run in runs.values()):
        raise ReportError(f"{path}: holds no step; the run ended before its first one")
    return list(runs.values())


def _add(runs: dict[tuple[str, str, int], Run], record: object, where: str) -> None:
    if not isinstance(record, dict):
        raise ReportError(f"{where}: asked for an object, found {type(record).__name__}")
    precision, align, seed = record.get("precision"), record.get("align"), record.get("seed")
    if not isinstance(precision, str) or not isinstance(align, str) or not isinstance(seed, int):
        raise ReportError(f"{where}: precision, align (text) and seed (an integer) must all be there")
    run = runs.setdefault((precision, align, seed), Run(precision, align, seed))
    if isinstance(record.get("final"), dict):
        run.final.update(record["final"])
    elif isinstance(record.get("step"), int) and isinstance(record.get("data"), dict):
        run.steps.setdefault(record["step"], {}).update(record["data"])
    else:
        raise ReportError(f"{where}: neither a step with data nor a final record")


def summarize(run: Run) -> dict[str, Any]:
    """The figures of one run under ``SUMMARY_KEYS``; None stands for what the run did not measure.

    Means of mismatch metrics are weighted by tokens; ``sync_bytes`` and ``sync_bytes_bf16`` are those of one sync.
    """
    accuracy = [value for _, value in run.accuracy]
    tokens = run.series("jetrl/tokens")
    seconds = [value for _, value in run.seconds]
    return {
        "precision": run.precision,
        "align": run.align,
        "seed": run.seed,
        "steps": len(run.training_steps),
        "tokens": int(sum(value for _, value in tokens)) if tokens else None,
        "accuracy_first": accuracy[0] if accuracy else None,
        "accuracy_last": accuracy[-1] if accuracy else None,
        "logp_abs_diff_mean": _token_mean(run, "jetrl/logp_abs_diff_mean"),
        "logp_abs_diff_max": _extreme(max, run, "jetrl/logp_abs_diff_max"),
        "bit_equal_fraction_min": _extreme(min, run, "jetrl/bit_equal_fraction"),
        "k3_kl_mean": _token_mean(run, "jetrl/k3_kl"),
        "sync_bytes": _last_integer(run, "jetrl/sync_bytes"),
        "sync_bytes_bf16": _last_integer(run, "jetrl/sync_bytes_bf16"),
        "sync_seconds_mean": _mean(value for _, value in run.series("jetrl/sync_seconds")),
        "step_seconds_median": median(seconds) if seconds else None,
        "peak_memory_bytes": run.final.get("peak_memory_bytes"),
        "quantized_layers": _last_integer(run, "jetrl/quantized_layers"),
        "versions": run.final.get("versions", {}),
    }


def _token_mean(run: Run, name: str) -> float | None:
    """Mean over tokens, NaN if any step is NaN: a broken step must not vanish in an average."""
    weights = dict(run.series("jetrl/tokens"))
    values = [(value, weights.get(step, 1.0)) for step, value in run.series(name)]
    total = sum(weight for _, weight in values)
    return sum(value * weight for value, weight in values) / total if total else None


def _extreme(pick: Any, run: Run, name: str) -> float | None:
    values = [value for _, value in run.series(name)]
    if any(math.isnan(value) for value in values):
        return math.nan
    return float(pick(values)) if values else None


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return fmean(found) if found else None


def _last_integer(run: Run, name: str) -> int | None:
    values = run.series(name)
    return int(values[-1][1]) if values else None
