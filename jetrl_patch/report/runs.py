"""One run: the metrics that its framework logged at every step, and the series that every report needs."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from jetrl_patch.errors import JetrlError

__all__ = ["PARTS", "ReportError", "Run", "number"]

#: the names that verl and OpenRLHF give to the same metric
REWARD = ("critic/score/mean", "rollout/reward_mean", "reward")
SECONDS = ("timing_s/step", "timing/step_total", "perf/time_per_step")  # verl times validation separately
ACCURACY = re.compile(r"val-core/.*/mean@\d+|eval_.*_pass1")

#: parts of a step, with the timers of both frameworks; the rest of a step is "other"
PARTS = {
    "rollout": ("timing_s/gen", "timing/generation"),
    "weight sync": ("timing_s/update_weights", "timing_s/sync_rollout_weights", "timing/broadcast"),
    "training": (
        "timing_s/old_log_prob", "timing_s/ref", "timing_s/values", "timing_s/adv", "timing_s/update_critic",
        "timing_s/update_actor", "timing/make_experience", "timing/ppo_train",
    ),
}  # fmt: skip

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

    precision: str
    align: str
    seed: int
    steps: dict[int, dict[str, Any]] = field(default_factory=dict)
    final: dict[str, Any] = field(default_factory=dict)
    correction: str = ""
    router_replay: str = ""
    name: str = ""
    source: str = ""

    @property
    def arm(self) -> str:
        """The name of the mode, ``PRECISION[/ALIGN][+CORRECTION][+ROUTER_REPLAY]``; "" if unknown."""
        align = "" if self.align in ("", "none") else f"/{self.align}"
        correction = "" if self.correction in ("", "none") else f"+{self.correction}"
        replay = "" if self.router_replay in ("", "none") else f"+{self.router_replay}"
        return f"{self.precision}{align}{correction}{replay}"

    @property
    def label(self) -> str:
        """The display name."""
        return self.name or self.arm or self.source

    @property
    def training_steps(self) -> list[int]:
        """The training steps, in order, without a validation before the first one."""
        return sorted(step for step, data in self.steps.items() if {*REWARD, *SECONDS, "jetrl/tokens"} & set(data))

    def series(self, name: str) -> Points:
        """``(step, value)`` of one metric, ascending, without steps that lack it; null counts as NaN."""
        pairs = ((step, number(self.steps[step][name])) for step in sorted(self.steps) if name in self.steps[step])
        return [(step, value) for step, value in pairs if value is not None]

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
        """``(step, held-out accuracy)``, averaged over data sources: verl's ``val-core/<source>/…/mean@n`` or OpenRLHF's
        ``eval_<source>_pass1``.
        """
        found: Points = []
        for step in sorted(self.steps):
            values = [
                value
                for name, raw in self.steps[step].items()
                if ACCURACY.fullmatch(name) and (value := number(raw)) is not None
            ]
            if values:
                found.append((step, fmean(values)))
        return found

    def corrected(self, name: str) -> Points:
        """The series of a figure on the correction. A run without one logs 0, which is no measurement: []."""
        found = self.series(name)
        on = self.correction not in ("", "none") or bool(self.series("jetrl/correction_weight_mean"))
        return found if on or any(value for _, value in found) else []

    @property
    def tokens(self) -> Points:
        """``(step, sampled tokens of all steps so far)``."""
        return _sums(self.series("jetrl/tokens"))

    @property
    def time(self) -> Points:
        """``(step, seconds of all steps so far)``."""
        return _sums(self.seconds)

    def part(self, name: str) -> Points:
        """``(step, seconds)`` of one of ``PARTS``; if the framework does not time the sync, the plugin's metric is used."""
        totals: dict[int, float] = {}
        for metric in PARTS[name]:
            for step, value in self.series(metric):
                totals[step] = totals.get(step, 0.0) + value
        if name == "weight sync" and not totals:
            return self.series("jetrl/sync_seconds")
        return sorted(totals.items())

    @property
    def parts(self) -> dict[str, float]:
        """Mean seconds per step of each of ``PARTS`` and of "other", over steps of known duration; {} if there are none."""
        lengths = {step: value for step, value in self.seconds if math.isfinite(value)}
        if not lengths:
            return {}
        sums = {
            name: sum(v for step, v in self.part(name) if step in lengths and math.isfinite(v)) / len(lengths)
            for name in PARTS
        }
        if not any(sums.values()):
            return {}
        # in an asynchronous run the parts overlap and may add up to more than the step
        return {**sums, "other": max(0.0, fmean(lengths.values()) - sum(sums.values()))}


def _sums(points: Points) -> Points:
    steps = [step for step, _ in points]
    return list(zip(steps, itertools.accumulate(v if math.isfinite(v) else 0.0 for _, v in points), strict=True))


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
    except OverflowError:
        return math.inf if value > 0 else -math.inf
