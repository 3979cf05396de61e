"""One run: the metrics that its framework logged at every step, the series that every report needs, and its summary."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from jetrl_patch.errors import JetrlError

#: the names that verl, OpenRLHF and TRL give to the same metric
REWARD = ("critic/score/mean", "rollout/reward_mean", "reward")
SECONDS = ("timing_s/step", "timing/step_total", "perf/time_per_step", "step_time")  # verl times validation separately
#: verl's val-core/SOURCE/…/mean@N and OpenRLHF's eval_SOURCE_pass1
ACCURACY = re.compile(r"val-core/.*/mean@\d+|eval_.*_pass1")

#: parts of a step, with the timers of both frameworks; the rest of a step is "other"
STEP_PARTS = {
    "rollout": ("timing_s/gen", "timing/generation"),
    "weight sync": ("timing_s/update_weights", "timing_s/sync_rollout_weights", "timing/broadcast"),
    "training": (
        "timing_s/old_log_prob", "timing_s/ref", "timing_s/values", "timing_s/adv", "timing_s/update_critic",
        "timing_s/update_actor", "timing/make_experience", "timing/ppo_train",
    ),
}  # fmt: skip

_CORRECTED = ("jetrl/clipped_fraction", "jetrl/masked_fraction")

Points = list[tuple[int, float]]


class ReportError(JetrlError, ValueError):
    """A metrics file that cannot be reported on."""


@dataclass
class Run:
    """One run: ``steps`` maps a step to the framework's metrics at that step.

    Attributes:
        precision, align, seed, correction, router_replay: the run's mode, as far as it is known; otherwise "" and 0.
        final: recorded at the end of the run: versions, memory, answers.
        name: display name; ``label`` falls back to the arm.
        source: where the run comes from; it keeps files with the same arm apart.
    """

    precision: str = ""
    align: str = ""
    seed: int = 0
    steps: dict[int, dict[str, Any]] = field(default_factory=dict)
    final: dict[str, Any] = field(default_factory=dict)
    correction: str = ""
    router_replay: str = ""
    name: str = ""
    source: str = ""

    @property
    def arm(self) -> str:
        """The name of the mode, ``PRECISION[/ALIGN][+CORRECTION][+ROUTER_REPLAY]``; "" if unknown."""
        words = (("/", self.align), ("+", self.correction), ("+", self.router_replay))
        return self.precision + "".join(mark + word for mark, word in words if word not in ("", "none"))

    @property
    def label(self) -> str:
        return self.name or self.arm or self.source

    @property
    def training_steps(self) -> list[int]:
        """The training steps, in order, without a validation before the first one."""
        return sorted(step for step, data in self.steps.items() if {*REWARD, *SECONDS, "jetrl/tokens"} & set(data))

    def series(self, name: str) -> Points:
        """``(step, value)`` of one metric, ascending, without steps that lack it; null counts as NaN.

        Empty for the correction's share of tokens where no correction was on: such a run logs 0 without measuring it.
        """
        values = ((step, number(self.steps[step][name])) for step in sorted(self.steps) if name in self.steps[step])
        found = [(step, value) for step, value in values if value is not None]
        if name in _CORRECTED and not any(value for _, value in found):
            corrects = self.correction not in ("", "none") or self.series("jetrl/correction_weight_mean")
            return found if corrects else []
        return found

    def first_of(self, names: tuple[str, ...]) -> Points:
        """The series of the first name that the run has."""
        return next((found for name in names if (found := self.series(name))), [])

    @property
    def reward(self) -> Points:
        """``(step, mean reward of the step's samples)``."""
        return self.first_of(REWARD)

    @property
    def seconds(self) -> Points:
        """``(step, duration in seconds)``."""
        return self.first_of(SECONDS)

    @property
    def accuracy(self) -> Points:
        """``(step, held-out accuracy)``, averaged over the data sources, which ``ACCURACY`` recognizes."""
        found = []
        for step, data in sorted(self.steps.items()):
            values = [number(raw) for name, raw in data.items() if ACCURACY.fullmatch(name)]
            if known := [value for value in values if value is not None]:
                found.append((step, fmean(known)))
        return found

    @property
    def tokens(self) -> Points:
        """``(step, sampled tokens of all steps so far)``."""
        return _sums(self.series("jetrl/tokens"))

    @property
    def time(self) -> Points:
        """``(step, seconds of all steps so far)``."""
        return _sums(self.seconds)

    def part(self, name: str) -> Points:
        """``(step, seconds)`` of one of ``STEP_PARTS``. Where the framework does not time the sync, the plugin does."""
        totals: dict[int, float] = {}
        for metric in STEP_PARTS[name]:
            for step, value in self.series(metric):
                totals[step] = totals.get(step, 0.0) + value
        if name == "weight sync" and not totals:
            return self.series("jetrl/sync_seconds")
        return sorted(totals.items())

    @property
    def parts(self) -> dict[str, float]:
        """Mean seconds per step of each of ``STEP_PARTS`` and of "other", over steps of known duration; {} if there are none."""
        lengths = {step: value for step, value in self.seconds if math.isfinite(value)}
        inside = {name: [v for step, v in self.part(name) if step in lengths and math.isfinite(v)] for name in STEP_PARTS}
        if not any(map(sum, inside.values())):
            return {}
        means = {name: sum(values) / len(lengths) for name, values in inside.items()}
        # in an asynchronous run the parts overlap and may add up to more than the step
        return {**means, "other": max(0.0, fmean(lengths.values()) - sum(means.values()))}


def _sums(points: Points) -> Points:
    sums = itertools.accumulate(value if math.isfinite(value) else 0.0 for _, value in points)
    return [(step, total) for (step, _), total in zip(points, sums, strict=True)]


def number(value: object) -> float | None:
    """``value`` as a float, including NaN and infinities (JSON's null is NaN); None if it is not a number."""
    if value is None:
        return math.nan
    if isinstance(value, str):  # some writers spell out what JSON cannot represent
        return {"nan": math.nan, "infinity": math.inf, "-infinity": -math.inf}.get(value.lower())
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:  # an integer
        return math.inf if value > 0 else -math.inf


def spelled(value: float) -> float | str:
    """``value`` for JSON and HTML, where NaN and infinities are words, which ``number`` reads."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def summarize(run: Run) -> dict[str, Any]:
    """Summarize one run for ``summary.json`` and the tables; None means that the run did not measure it.

    Means of mismatch metrics are weighted by tokens. ``sync_bytes`` and ``sync_bytes_bf16`` are per weight sync,
    ``sync_share`` is the weight sync's share of the total time, and ``parts`` are mean seconds per step.
    """
    tokens, parts = run.series("jetrl/tokens"), run.parts
    syncs, lengths = finite(run.series("jetrl/sync_seconds")), finite(run.seconds)

    def mean(name: str) -> float | None:
        """Mean over tokens. NaN if any step is NaN, so that a broken step does not disappear in the average."""
        weights = dict(tokens)
        values = [(value, weights.get(step, 1.0)) for step, value in run.series(f"jetrl/{name}")]
        total = sum(weight for _, weight in values)
        return sum(value * weight for value, weight in values if weight) / total if total else None

    def last(name: str) -> int | None:
        values = finite(run.series(f"jetrl/{name}"))
        return int(values[-1]) if values else None

    return {
        "name": run.label,
        "precision": run.precision,
        "align": run.align,
        "correction": run.correction,
        "router_replay": run.router_replay,
        "seed": run.seed if run.precision else None,
        "steps": len(run.training_steps),
        "tokens": int(sum(finite(tokens))) if tokens else None,
        **_ends("reward", run.reward),
        **_ends("accuracy", run.accuracy),
        "logp_abs_diff_mean": mean("logp_abs_diff_mean"),
        "logp_abs_diff_max": extreme(max, run.series("jetrl/logp_abs_diff_max")),
        "bit_equal_fraction_min": extreme(min, run.series("jetrl/bit_equal_fraction")),
        "route_mismatch_mean": mean("route_mismatch"),
        "ess_mean": mean("ess"),
        "clipped_fraction_mean": mean("clipped_fraction"),
        "k3_kl_mean": mean("k3_kl"),
        "sync_bytes": last("sync_bytes"),
        "sync_bytes_bf16": last("sync_bytes_bf16"),
        "sync_seconds_mean": fmean(syncs) if syncs else None,
        "sync_share": parts["weight sync"] / sum(parts.values()) if parts.get("weight sync") else None,
        "step_seconds_median": median(lengths) if lengths else None,
        "parts": parts,
        "peak_memory_bytes": run.final.get("peak_memory_bytes"),
        "quantized_layers": last("quantized_layers"),
        "versions": run.final.get("versions") or {},
    }


def finite(points: Points) -> list[float]:
    return [value for _, value in points if math.isfinite(value)]


def extreme(pick: Callable[[Iterable[float]], float], points: Points) -> float | None:
    """The largest or smallest value, by ``max`` or ``min``; NaN if any is NaN, None if there is none."""
    values = [value for _, value in points]
    return math.nan if any(map(math.isnan, values)) else pick(values) if values else None


def _ends(name: str, points: Points) -> dict[str, float | None]:
    first, last = (points[0][1], points[-1][1]) if points else (None, None)
    return {f"{name}_first": first, f"{name}_last": last, f"{name}_best": max(finite(points), default=None)}
