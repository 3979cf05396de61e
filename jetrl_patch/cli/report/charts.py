"""The charts of a report, shared by the page and the pictures: what they show and how, and the look of each run's line.

A statistic of one layer is recognized by its name, ``jetrl/<group>/<layer>/<what>``, where the layer may contain slashes.
``jetrl/<group>/<what>`` is a statistic over all layers, such as the monitor's ``jetrl/scale/weight_sqnr_min``.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from jetrl_patch.cli.report.runs import REWARD, SECONDS, Points, Run, extreme, number, spelled
from jetrl_patch.config.fields import Fields

GROUPS = LEARNING, MISMATCH, TIME, FP8, OTHER = (
    "Learning", "Mismatch between rollout and trainer", "Time", "FP8 statistics", "Other metrics",
)  # fmt: skip


class Limit(NamedTuple):
    """A threshold, drawn as a line."""

    value: float
    name: str


@dataclass(frozen=True)
class Chart:
    """One chart.

    Attributes:
        metrics: it shows the first of these that a run has.
        series: one per run, in the order of the runs; [] for a run without data.
        log: whether the axis is logarithmic, with a separate band for 0.
        low, high: fixed ends of the axis; None follows the data.
        style: format of the values: number, count (whole numbers), share, seconds or db.
    """

    key: str
    title: str
    group: str
    help: str = ""
    metrics: tuple[str, ...] = ()
    log: bool = False
    low: float | None = None
    high: float | None = None
    style: str = "number"
    limits: tuple[Limit, ...] = ()
    series: Sequence[Points] = ()

    @property
    def steady(self) -> float | None:
        """The one value that every run has at every step, or None."""
        values = {value for points in self.series for _, value in points}
        return values.pop() if len(values) == 1 and all(map(math.isfinite, values)) else None

    def text(self, value: float) -> str:
        """A value for a reader; only 1.0 reads 100%."""
        if not math.isfinite(value):
            return str(spelled(value))
        if self.style == "share":
            share = f"{100 * value:.5g}%"
            return share if share != "100%" or value == 1 else "almost 100%"
        form = {"count": ",.10g", "seconds": ".3g"}.get(self.style, ".4g")
        return f"{value:{form}}" + {"seconds": " s", "db": " dB"}.get(self.style, "")

    def ends(self, least: float, most: float) -> tuple[float, float, list[Limit]]:
        """Ends of a linear axis for values from ``least`` to ``most``, without impossible values, and the limits inside."""
        reach = 4 * (most - least)
        limits = [x for x in self.limits if self.style == "db" or least - reach <= x.value <= most + reach]
        low, high = (pick((value, *(x.value for x in limits))) for pick, value in ((min, least), (max, most)))
        pad = 0.05 * (high - low) or 0.05 * abs(high) or 0.1
        bottom = max(0.0, low - pad) if least >= 0 else low - pad
        top = min(1.0, high + pad) if self.style == "share" and most <= 1 else high + pad
        return bottom if self.low is None else self.low, (top if self.high is None else self.high), limits


# ---- Metrics of training -------------------------------------------------------------------------

_CHARTS = (
    Chart("reward", "Reward of the training batch", LEARNING, metrics=REWARD),
    Chart("accuracy", "Accuracy on held-out questions", LEARNING, low=0, high=1, style="share"),
    Chart("mismatch-mean", "Mean |Δ log-prob|", MISMATCH,
          "rollout vs. trainer for the same token and weights; on-policy RL assumes 0", ("jetrl/logp_abs_diff_mean",), log=True),
    Chart("mismatch-max", "Largest |Δ log-prob|", MISMATCH,
          "maximum over the tokens of the step", ("jetrl/logp_abs_diff_max",), log=True),
    Chart("k3", "k3 KL", MISMATCH,
          "mean of r − 1 − log r per token; at least 0 up to rounding", ("jetrl/k3_kl", "rollout_corr/k3_kl"), log=True),
    Chart("bit-equal", "Bit-equal tokens", MISMATCH, "share of tokens with bit-identical log-probs in rollout and trainer",
          ("jetrl/bit_equal_fraction",), low=0, high=1, style="share"),
    Chart("ess", "Effective sample size", MISMATCH,
          "of the importance weights, as a share of the tokens; 100% if all weights are equal", ("jetrl/ess",), style="share"),
    Chart("clipped", "Clipped tokens", MISMATCH, "share of tokens whose ratio is outside the correction's bounds",
          ("jetrl/clipped_fraction",), low=0, style="share"),
    Chart("masked", "Masked tokens", MISMATCH, "share of tokens that the correction removes from the loss",
          ("jetrl/masked_fraction",), low=0, style="share"),
    Chart("seconds", "Seconds per step", TIME, metrics=SECONDS, low=0, style="seconds"),
    Chart("sync", "Weight sync", TIME, "from the trainer to the rollout engine", ("jetrl/sync_seconds",), low=0, style="seconds"),
)  # fmt: skip
#: the charts that show more than one metric
_READ: dict[str, Callable[[Run], Points]] = {
    "accuracy": lambda run: run.accuracy,
    "sync": lambda run: run.part("weight sync"),
}
#: further metrics that get a chart if a run has them, like the plugin's other metrics
_MORE = {
    "actor/entropy": "Entropy",
    **dict.fromkeys(("actor/grad_norm", "actor_grad_norm"), "Gradient norm"),
    **dict.fromkeys(("actor/pg_loss", "policy_loss"), "Policy loss"),
    **dict.fromkeys(("actor/lr", "actor_lr"), "Learning rate"),
    **dict.fromkeys(("response_length/mean", "response_length"), "Response length"),
    "training/rollout_probs_diff_mean": "Mean |Δ probability|, measured by verl",
}
_SHOWN = {name for chart in _CHARTS for name in chart.metrics}
_MOST_OTHERS = 24


def draw(runs: Sequence[Run]) -> list[Chart]:
    """The charts for which at least one run has data, in page order, without per-layer statistics."""
    found = []
    for chart in (*_CHARTS, *_others(runs)):
        read = _READ.get(chart.key, functools.partial(Run.first_of, names=chart.metrics))
        series = [read(run) for run in runs]
        if any(series):
            values = [value for points in series for _, value in points]
            whole = chart.group == OTHER and all(math.isfinite(value) and value == int(value) for value in values)
            found.append(replace(chart, series=series, style="count" if whole else chart.style))
    return found


def _others(runs: Sequence[Run]) -> Iterator[Chart]:
    present = {name for run in runs for data in run.steps.values() for name in data}
    own = [name for name in present - _SHOWN if name.startswith("jetrl/") and name.count("/") == 1]
    titles: dict[str, list[str]] = {}
    for name in (*_MORE, *sorted(own)):
        if name in present:
            titles.setdefault(_MORE.get(name) or name.removeprefix("jetrl/").replace("_", " "), []).append(name)
    for title, names in list(titles.items())[:_MOST_OTHERS]:
        yield Chart("more-" + names[0].replace("/", "-"), title, OTHER, " or ".join(names), tuple(names))


# ---- Statistics of layers ------------------------------------------------------------------------

ALL_LAYERS = ""

#: figure -> title, explanation, style. The names are those of ``measure.statistics.Figures`` with spaces
_FIGURES = {
    "slice sqnr": ("SQNR of rows and columns", "signal over quantization error; each row counts alike, and each column", "db"),
    "sqnr": ("SQNR", "signal over quantization error of the whole tensor; e4m3 gives about 31 dB", "db"),
    "underflow": ("underflow", "share of nonzero values that became zero", "share"),
    "saturated": ("saturation", "share of values beyond 448 scales; 0 unless there is a bug", "share"),
    "amax": ("largest magnitude", "largest finite magnitude before quantization", "number"),
    "scale min": ("smallest scale", "over the groups that are not empty", "number"),
    "scale max": ("largest scale", "over the groups that are not empty", "number"),
    "nonfinite": ("NaN and Inf", "number of values that are not finite", "count"),
    "unchanged": ("codes unchanged", "share of FP8 codes that the last step left as they were", "share"),
    "worst layer": ("worst layer", "position of the layer with the lowest SQNR, in the model's order", "count"),
    "worst experts": ("layer of the worst expert", "position of the layer whose experts have the lowest SQNR", "count"),
    "worst expert": ("worst expert", "number of the expert with the lowest SQNR", "count"),
}
_NAME = re.compile(rf"(weight|activation|gradient) ({'|'.join(_FIGURES)})(?: (min|mean|max))?")
_OVER = {None: "", "min": ", lowest layer", "max": ", highest layer", "mean": ", mean of the layers"}
_SQNR = Limit(Fields.monitor_sqnr, f"monitor_sqnr {Fields.monitor_sqnr:g} dB")
#: the monitor's warnings, with their default thresholds
_LIMITS = {
    "sqnr": (_SQNR,),
    "slice sqnr": (_SQNR,),
    "underflow": (Limit(Fields.monitor_underflow, f"monitor_underflow {Fields.monitor_underflow:.0%}"),),
}

_INFORMATIVE = ("sqnr", "underflow", "saturat", "unchanged")  # the most informative first
_HEADLINE = re.compile(r"(?<!slice )(sqnr min|underflow max|saturat\w+ max|unchanged mean)$")
_PLACE = re.compile(r" worst (layer|experts?)$")
_LESS_IS_WORSE = re.compile(r"sqnr|snr|cos|min\b")
_MOST_HEADLINES = 12


@functools.cache
def split_name(name: str) -> tuple[str, str] | None:
    """``(what, layer)`` of a layer statistic's name, else None. ``what`` starts with the group unless that is ``scale``."""
    if not name.startswith("jetrl/") or name.count("/") < 2:
        return None
    _, group, *layer, what = name.split("/")
    return ("" if group == "scale" else f"{group} ") + what.replace("_", " "), "/".join(layer)


def describe(what: str) -> Chart:
    """The chart of a statistic that ``split_name`` names, without series. The title is its name if it is not the monitor's."""
    key, found = "scale-" + what.replace(" ", "-"), _NAME.fullmatch(what)
    if found is None:
        return Chart(key, what, FP8, style="db" if re.search(r"\bs(q)?nr( db)?\b", what) else "number")
    kind, figure, over = found.groups()
    title, text, style = _FIGURES[figure]
    return Chart(key, f"{kind.capitalize()} {title}{_OVER[over]}", FP8, text, style=style, limits=_LIMITS.get(figure, ()))


class Scales:
    """The layer statistics of all runs.

    Attributes:
        series: statistic, such as ``weight sqnr``, the most informative first -> layer -> one series per run.
        layers: names of the layers in natural order, without ``ALL_LAYERS``.
        headline: the statistics that get a chart by default.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        found: dict[str, dict[str, list[Points]]] = {}
        for i, run in enumerate(runs):
            for step, data in sorted(run.steps.items()):
                for name, raw in data.items():
                    if (split := split_name(name)) and (value := number(raw)) is not None:
                        what, layer = split
                        series = found.setdefault(what, {}).setdefault(layer, [[] for _ in runs])
                        series[i].append((step, value))
        self.series = dict(sorted(found.items(), key=lambda item: ([word not in item[0] for word in _INFORMATIVE], item[0])))
        self.layers = sorted({layer for layers in found.values() for layer in layers} - {ALL_LAYERS}, key=_natural)
        loud = {
            what for what, layers in found.items()
            if any(value for series in layers.values() for points in series for _, value in points)
        }  # fmt: skip
        overall = [what for what in self.series if not self.per_layer(what) and _HEADLINE.search(what)] or list(self.series)
        self.headline = [what for what in overall if what in loud and not _PLACE.search(what)][:_MOST_HEADLINES]

    def per_layer(self, what: str) -> bool:
        """Whether the statistic is available for single layers."""
        return any(layer != ALL_LAYERS for layer in self.series[what])

    def chart(self, what: str) -> Chart:
        """The chart of a statistic: the value over all layers, or of the worst layer at each step."""
        known, series = describe(what), []
        for each in zip(*self.series[what].values(), strict=True):
            steps: dict[int, Points] = {}
            for step, value in itertools.chain(*each):
                steps.setdefault(step, []).append((step, value))
            series.append([(step, worst(what, points)) for step, points in sorted(steps.items())])
        means = f"worst means {'lowest' if _LESS_IS_WORSE.search(what) else 'highest'} here" if self.per_layer(what) else ""
        return replace(known, help="; ".join(filter(None, (known.help, means))), series=series)


def worst(what: str, points: Points) -> Any:
    """The worst value of a statistic: the largest, for a signal-to-noise ratio the smallest; any NaN gives NaN.

    Of numbers of layers and experts, none of which is worse than another, the last.
    """
    if _PLACE.search(what):
        return points[-1][1]
    return extreme(min if _LESS_IS_WORSE.search(what) else max, points)


def _natural(name: str) -> list[tuple[int, int, str]]:
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name)]


# ---- Lines ---------------------------------------------------------------------------------------

#: most points per line on the page, about 1.5 per pixel
LIMIT = 600

#: Okabe and Ito's colors, which remain distinct under the common kinds of color blindness: blue, vermilion, green, purple,
#: ochre, sky, grey, brown. Darkened for a contrast of at least 3 to 1 on white
COLORS = ("#0072b2", "#d55e00", "#007d5c", "#a83a86", "#8f6a00", "#2a8ec4", "#5b6472", "#8c4a2f")

#: lengths of dashes and gaps; the empty one is a solid line
DASHES = ((), (7, 3), (2, 3), (9, 3, 2, 3))

_OF_ARM = {"bf16": 6, "fp8-rollout": 1, "fp8-unified/linear": 3, "fp8-unified/exact": 2}


class Style(NamedTuple):
    """One of ``COLORS``, and lengths of dashes and gaps."""

    color: str
    dash: tuple[int, ...]


def choose(runs: Sequence[Run]) -> list[Style]:
    """Choose a style for every run: seeds of one arm share a color and differ in dashes; known arms have fixed colors.

    With one seed per arm, the dashes change along with the colors: color is never the only difference.
    """
    keys = [(run.source, run.arm or run.label) for run in runs]
    arms = list(dict.fromkeys(keys))
    taken: list[int] = []
    for position, (_, arm) in enumerate(arms):
        free = [slot for slot in range(len(COLORS)) if slot not in taken]
        unknown = [slot for slot in free if slot not in _OF_ARM.values()]
        if not free:  # start over, with other dashes
            taken.append(taken[position % len(COLORS)])
        else:
            taken.append(_OF_ARM[arm] if _OF_ARM.get(arm) in free else (unknown or free)[0])
    styles = []
    for i, key in enumerate(keys):
        position = arms.index(key)
        nth = keys[:i].count(key) if len(arms) < len(runs) else position + position // len(COLORS)
        styles.append(Style(COLORS[taken[position]], DASHES[nth % len(DASHES)]))
    return styles


def thin(points: Points, limit: int = LIMIT) -> Points:
    """Keep at most ``limit`` points, in order: the first, the last, and the minimum, maximum and one non-finite point of
    each bin.

    A series that is short enough is returned unchanged. ``limit`` must be at least 5.
    """
    if len(points) <= limit:
        return points
    bins = (limit - 2) // 3
    kept = {0, len(points) - 1}
    for b in range(bins):
        inside = range(b * len(points) // bins, (b + 1) * len(points) // bins)
        numbers = [i for i in inside if math.isfinite(points[i][1])]
        if numbers:
            kept |= {min(numbers, key=lambda i: points[i][1]), max(numbers, key=lambda i: points[i][1])}
        kept.update([i for i in inside if not math.isfinite(points[i][1])][:1])
    return [points[i] for i in sorted(kept)]
