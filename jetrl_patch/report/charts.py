"""The charts of a report: series, titles and axes, shared by the page and the pictures."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from jetrl_patch.report.described import Limit
from jetrl_patch.report.runs import ACCURACY, PARTS, REWARD, SECONDS, Points, Run

__all__ = ["GROUPS", "SCALE_PREFIX", "Chart", "Drawn", "draw", "steady", "wanted"]

#: per-layer statistics are named ``jetrl/<anything>/<layer>/<what>``
SCALE_PREFIX = "jetrl/"

GROUPS = ("Learning", "Mismatch between rollout and trainer", "Time", "FP8 statistics", "Other metrics")


@dataclass(frozen=True)
class Chart:
    """One chart.

    Attributes:
        read: returns the series of a run, [] if the run lacks it.
        log: whether the axis is logarithmic, with a separate band for 0.
        low, high: fixed ends of the axis; None follows the data.
        style: format of the values: number, count (whole numbers), share, seconds or db.
        limits: thresholds, drawn as lines.
    """

    key: str
    title: str
    group: str
    read: Callable[[Run], Points]
    help: str = ""
    log: bool = False
    low: float | None = None
    high: float | None = None
    style: str = "number"
    limits: tuple[Limit, ...] = ()


@dataclass(frozen=True)
class Drawn:
    """A chart with one series per run, in the order of the runs; [] for a run without data."""

    chart: Chart
    series: list[Points]


def _metric(*names: str) -> Callable[[Run], Points]:
    return lambda run: run.first_of(names)


def _corrected(name: str) -> Callable[[Run], Points]:
    return lambda run: run.corrected(name)


_CHARTS = (
    Chart("reward", "Reward of the training batch", GROUPS[0], lambda run: run.reward),
    Chart("accuracy", "Accuracy on held-out questions", GROUPS[0], lambda run: run.accuracy, low=0, high=1, style="share"),
    Chart("mismatch-mean", "Mean |Δ log-prob|", GROUPS[1], _metric("jetrl/logp_abs_diff_mean"), log=True,
          help="rollout vs. trainer for the same token and weights; on-policy RL assumes 0"),
    Chart("mismatch-max", "Largest |Δ log-prob|", GROUPS[1], _metric("jetrl/logp_abs_diff_max"), log=True,
          help="maximum over the tokens of the step"),
    Chart("k3", "k3 KL", GROUPS[1], _metric("jetrl/k3_kl", "rollout_corr/k3_kl"), log=True,
          help="mean of r − 1 − log r per token; at least 0 up to rounding"),
    Chart("bit-equal", "Bit-equal tokens", GROUPS[1], _metric("jetrl/bit_equal_fraction"), low=0, high=1, style="share",
          help="share of tokens with bit-identical log-probs in rollout and trainer"),
    Chart("ess", "Effective sample size", GROUPS[1], _metric("jetrl/ess"), style="share",
          help="of the importance weights, as a share of the tokens; 100% if all weights are equal"),
    Chart("clipped", "Clipped tokens", GROUPS[1], _corrected("jetrl/clipped_fraction"), low=0, style="share",
          help="share of tokens whose ratio is outside the correction's bounds"),
    Chart("masked", "Masked tokens", GROUPS[1], _corrected("jetrl/masked_fraction"), low=0, style="share",
          help="share of tokens that the correction removes from the loss"),
    Chart("seconds", "Seconds per step", GROUPS[2], lambda run: run.seconds, low=0, style="seconds"),
    Chart("sync", "Weight sync", GROUPS[2], lambda run: run.part("weight sync"), low=0, style="seconds",
          help="from the trainer to the rollout engine"),
)  # fmt: skip

#: further metrics that get a chart if a run has them
_MORE = {
    "actor/entropy": "Entropy",
    "actor/grad_norm": "Gradient norm",
    "actor_grad_norm": "Gradient norm",
    "actor/pg_loss": "Policy loss",
    "policy_loss": "Policy loss",
    "actor/lr": "Learning rate",
    "actor_lr": "Learning rate",
    "response_length/mean": "Response length",
    "response_length": "Response length",
    "training/rollout_probs_diff_mean": "Mean |Δ probability|, measured by verl",
}
_TOLD = {"jetrl/logp_abs_diff_mean", "jetrl/logp_abs_diff_max", "jetrl/k3_kl", "jetrl/bit_equal_fraction", "jetrl/ess",
         "jetrl/clipped_fraction", "jetrl/masked_fraction", "jetrl/sync_seconds"}  # fmt: skip
_MOST = 24  # charts in the last group


@functools.cache
def wanted(name: str) -> bool:
    """Whether a report shows the metric; others are not kept, which saves memory on long runs."""
    shown = {*REWARD, *SECONDS, *(part for parts in PARTS.values() for part in parts), *_MORE, "rollout_corr/k3_kl"}
    return name.startswith(SCALE_PREFIX) or name in shown or ACCURACY.fullmatch(name) is not None


def draw(runs: Sequence[Run]) -> list[Drawn]:
    """The charts for which at least one run has data, in page order."""
    found = [Drawn(chart, [chart.read(run) for run in runs]) for chart in (*_CHARTS, *_more(runs))]
    return [drawn for drawn in found if any(drawn.series)]


def _more(runs: Sequence[Run]) -> Iterable[Chart]:
    """Known metrics of the frameworks, then the plugin's metrics without a chart; per-layer metrics are excluded."""
    present = {name for run in runs for data in run.steps.values() for name in data}
    titles: dict[str, list[str]] = {}
    for name, title in _MORE.items():
        if name in present:
            titles.setdefault(title, []).append(name)
    own = sorted(name for name in present if name.startswith("jetrl/") and name.count("/") == 1 and name not in _TOLD)
    titles |= {_title(name): [name] for name in own}
    for title, names in list(titles.items())[:_MOST]:
        read = _metric(*names)
        style = "count" if _whole(value for run in runs for _, value in read(run)) else "number"
        yield Chart("more-" + names[0].replace("/", "-"), title, GROUPS[4], read, help=" or ".join(names), style=style)


def steady(drawn: Drawn) -> float | None:
    """The one value that every run has at every step, or None."""
    values = {value for points in drawn.series for _, value in points}
    return values.pop() if len(values) == 1 and math.isfinite(min(values)) else None


def _whole(values: Iterable[float]) -> bool:
    return all(math.isfinite(value) and value == int(value) for value in values)


def _title(name: str) -> str:
    return name.removeprefix("jetrl/").replace("_", " ")
