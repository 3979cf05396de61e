"""Which lines a report draws, under which titles and on which axes. Page and pictures take them from here."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from jetrl_patch.report.runs import ACCURACY, PARTS, REWARD, SECONDS, Points, Run

__all__ = ["GROUPS", "SCALE_PREFIX", "Chart", "Drawn", "draw", "wanted"]

#: per-layer statistics are ``jetrl/<anything>/<layer>/<what>``
SCALE_PREFIX = "jetrl/"

GROUPS = ("Learning", "Mismatch between rollout and trainer", "Time", "FP8 statistics", "More of the run")


@dataclass(frozen=True)
class Chart:
    """One chart.

    Attributes:
        read: its series in a run, [] where the run lacks it.
        log: a logarithmic axis with a band of its own for 0.
        low, high: ends of the axis that stand; None follows the data.
        style: how values are written: number, share or seconds.
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


@dataclass(frozen=True)
class Drawn:
    """A chart with the series of every run, in the order of the runs; [] where a run has none."""

    chart: Chart
    series: list[Points]


def _metric(*names: str) -> Callable[[Run], Points]:
    return lambda run: run.first_of(names)


_CHARTS = (
    Chart("reward", "Reward of the training batch", GROUPS[0], lambda run: run.reward),
    Chart("accuracy", "Accuracy on held-out questions", GROUPS[0], lambda run: run.accuracy, low=0, high=1, style="share"),
    Chart("mismatch-mean", "Mean |Δ log-prob|", GROUPS[1], _metric("jetrl/logp_abs_diff_mean"), log=True,
          help="same token, same weights; on-policy learning assumes 0"),
    Chart("mismatch-max", "Largest |Δ log-prob|", GROUPS[1], _metric("jetrl/logp_abs_diff_max"), log=True,
          help="over all tokens of the step"),
    Chart("k3", "k3 KL", GROUPS[1], _metric("jetrl/k3_kl", "rollout_corr/k3_kl"), log=True,
          help="r − 1 − log r per token, which is never negative but for rounding"),
    Chart("bit-equal", "Bit-equal tokens", GROUPS[1], _metric("jetrl/bit_equal_fraction"), low=0, high=1, style="share",
          help="share of tokens whose two log-probs are the same bits"),
    Chart("ess", "Effective sample size", GROUPS[1], _metric("jetrl/ess"), style="share",
          help="of the importance weights, as a share of the tokens"),
    Chart("clipped", "Clipped tokens", GROUPS[1], _metric("jetrl/clipped_fraction"), low=0, style="share",
          help="share of tokens whose ratio lies outside the correction's bounds"),
    Chart("masked", "Masked tokens", GROUPS[1], _metric("jetrl/masked_fraction"), low=0, style="share",
          help="share of tokens that the correction takes out"),
    Chart("seconds", "Seconds a step", GROUPS[2], lambda run: run.seconds, low=0, style="seconds"),
    Chart("sync", "Weight sync", GROUPS[2], lambda run: run.part("weight sync"), low=0, style="seconds",
          help="from the trainer to the rollout engine"),
)  # fmt: skip

#: what else is worth a chart where a run has it
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
    "training/rollout_probs_diff_mean": "Mean |Δ probability|, as verl measures it",
}
_TOLD = {"jetrl/logp_abs_diff_mean", "jetrl/logp_abs_diff_max", "jetrl/k3_kl", "jetrl/bit_equal_fraction", "jetrl/ess",
         "jetrl/clipped_fraction", "jetrl/masked_fraction", "jetrl/sync_seconds"}  # fmt: skip
_MOST = 24  # charts under "more"


@functools.cache
def wanted(name: str) -> bool:
    """Whether a report shows a metric of this name: the rest of a long run is not worth its memory."""
    shown = {*REWARD, *SECONDS, *(part for parts in PARTS.values() for part in parts), *_MORE, "rollout_corr/k3_kl"}
    return name.startswith(SCALE_PREFIX) or name in shown or ACCURACY.fullmatch(name) is not None


def draw(runs: Sequence[Run]) -> list[Drawn]:
    """The charts for which at least one run has something, in the order of the page."""
    found = [Drawn(chart, [chart.read(run) for run in runs]) for chart in (*_CHARTS, *_more(runs))]
    return [drawn for drawn in found if any(drawn.series)]


def _more(runs: Sequence[Run]) -> Iterable[Chart]:
    """Known figures of the frameworks, then the plugin's own that have no chart yet; those per layer are not here."""
    present = {name for run in runs for data in run.steps.values() for name in data}
    titles: dict[str, list[str]] = {}
    for name, title in _MORE.items():
        if name in present:
            titles.setdefault(title, []).append(name)
    own = sorted(name for name in present if name.startswith("jetrl/") and name.count("/") == 1 and name not in _TOLD)
    titles |= {_title(name): [name] for name in own}
    for title, names in list(titles.items())[:_MOST]:
        yield Chart("more-" + names[0].replace("/", "-"), title, GROUPS[4], _metric(*names), help=" or ".join(names))


def _title(name: str) -> str:
    return name.removeprefix("jetrl/").replace("_", " ")
