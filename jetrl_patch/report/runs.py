"""One run: what its framework logged for every step, and the few series that every report needs, by whatever name."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from jetrl_patch.errors import JetrlError

__all__ = ["PARTS", "ReportError", "Run", "number"]

#: names of verl and of OpenRLHF for the same figure
REWARD = ("critic/score/mean", "rollout/reward_mean", "reward")
SECONDS = ("timing_s/step", "timing/step_total", "perf/time_per_step")  # verl times validation apart from the step
ACCURACY = re.compile(r"val-core/.*/mean@\d+|eval_.*_pass1")

#: what a step is made of, by the names of both frameworks; what is in none of them is "other"
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
    """One run: ``steps`` maps a step to the framework's metrics of that step.

    Attributes:
        precision, align, seed, correction: what it ran in, as far as it is known; "" and 0 else.
        final: what was noted at its end: versions, memory, answers.
        name: what people see; ``label`` falls back to the arm.
        source: where it was given, so that two files with the same arm stay two runs.
    """

    precision: str
    align: str
    seed: int
    steps: dict[int, dict[str, Any]] = field(default_factory=dict)
    final: dict[str, Any] = field(default_factory=dict)
    correction: str = ""
    name: str = ""
    source: str = ""

    @property
    def arm(self) -> str:
        """The name of the mode, ``PRECISION[/ALIGN][+CORRECTION]``; "" if unknown."""
        align = "" if self.align in ("", "none") else f"/{self.align}"
        correction = "" if self.correction in ("", "none") else f"+{self.correction}"
        return f"{self.precision}{align}{correction}"

    @property
    def label(self) -> str:
        """The name people see."""
        return self.name or self.arm or self.source

    @property
    def training_steps(self) -> list[int]:
        """The steps that trained, in order: a validation before the first one is not among them."""
        return sorted(step for step, data in self.steps.items() if {*REWARD, *SECONDS, "jetrl/tokens"} & set(data))

    def series(self, name: str) -> Points:
        """``(step, value)`` of one metric, ascending, without the steps that lack it; null, as NaN is written, is NaN."""
        pairs = ((step, number(self.steps[step][name])) for step in sorted(self.steps) if name in self.steps[step])
        return [(step, value) for step, value in pairs if value is not None]

    def first_of(self, names: tuple[str, ...]) -> Points:
        """The series of the first name that the run has."""
        return next((found for name in names if (found := self.series(name))), [])

    @property
    def reward(self) -> Points:
        """``(step, mean reward of its samples)``."""
        return self.first_of(REWARD)

    @property
    def seconds(self) -> Points:
        """``(step, seconds it took)``."""
        return self.first_of(SECONDS)

    @property
    def accuracy(self) -> Points:
        """``(step, held-out accuracy)``: the mean over data sources of verl's ``val-core/<source>/…/mean@n`` or OpenRLHF's
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

    def part(self, name: str) -> Points:
        """``(step, seconds)`` of one of ``PARTS``; where the framework does not time the sync, the plugin's own figure."""
        totals: dict[int, float] = {}
        for metric in PARTS[name]:
            for step, value in self.series(metric):
                totals[step] = totals.get(step, 0.0) + value
        if name == "weight sync" and not totals:
            return self.series("jetrl/sync_seconds")
        return sorted(totals.items())

    @property
    def parts(self) -> dict[str, float]:
        """Mean seconds a step of each of ``PARTS`` and of "other", over the steps whose length is known; {} without any."""
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


def number(value: object) -> float | None:
    """``value`` as a float, NaN and infinities included (JSON's null is NaN); None when it is no number."""
    if value is None:
        return math.nan
    if isinstance(value, str):  # how some writers put what JSON has no word for
        return {"nan": math.nan, "infinity": math.inf, "-infinity": -math.inf}.get(value.lower())
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
