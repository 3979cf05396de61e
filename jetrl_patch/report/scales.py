"""Per-layer statistics, recognized by name: ``jetrl/<group>/<layer>/<what>``, where the layer may contain slashes.

A layer's name contains a digit or a dot. If the layer comes last, the statistic is the part before it.
``jetrl/<group>/<what>`` is a statistic over all layers, such as the monitor's ``jetrl/scale/weight_sqnr_min``.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from jetrl_patch.report.charts import GROUPS, SCALE_PREFIX, Chart, Drawn
from jetrl_patch.report.described import describe
from jetrl_patch.report.runs import Points, Run, number

__all__ = ["ALL_LAYERS", "Scales", "draw_scales", "less_is_worse", "read_scales", "split_name"]

ALL_LAYERS = "all layers together"

_LAYER = re.compile(r".*(\.|\d).*")
_TELLING = ("sqnr", "underflow", "saturat", "unchanged")  # the most informative first
_HEADLINE = re.compile(r"(?<!slice )(sqnr min|underflow max|saturat\w+ max|unchanged mean)$")
_EXPERT = " worst expert"
_PLACE = re.compile(r" worst (layer|experts?)$")
_MOST = 12  # charts
_LESS_IS_WORSE = re.compile(r"sqnr|snr|cos|min\b")


@dataclass
class Scales:
    """Per-layer statistics of all runs.

    Attributes:
        whats: names of the statistics, such as ``weight sqnr``, the most informative first.
        layers: names of the layers in natural order, without ``ALL_LAYERS``.
        series: ``(run, what, layer)`` -> points, without what a run lacks.
    """

    whats: list[str] = field(default_factory=list)
    layers: list[str] = field(default_factory=list)
    series: dict[tuple[int, str, str], Points] = field(default_factory=dict)

    def worst(self, run: int, what: str, layer: str) -> float | None:
        """The worst value over the steps: the largest, for a signal-to-noise ratio the smallest; any NaN gives NaN.

        The number of an expert is that of the step with the layer's worst signal-to-noise ratio.
        """
        if what.endswith(_EXPERT):
            return self._worst_expert(run, what, layer)
        values = [value for _, value in self.series.get((run, what, layer), [])]
        if any(math.isnan(value) for value in values):
            return math.nan
        return (min if less_is_worse(what) else max)(values, default=None)

    def _worst_expert(self, run: int, what: str, layer: str) -> float | None:
        kind = what.removesuffix(_EXPERT)
        ratios = (self.series.get((run, f"{kind} {figure}", layer), []) for figure in ("sqnr", "slice sqnr"))
        numbers = dict(self.series.get((run, what, layer), []))
        known = [(value, step) for points in ratios for step, value in points if step in numbers and not math.isnan(value)]
        return numbers[min(known)[1]] if known else None

    def worst_layer(self, run: int, what: str) -> Points:
        """The value of the worst layer at each step."""
        steps: dict[int, float] = {}
        pick = min if less_is_worse(what) else max
        for layer in (ALL_LAYERS, *self.layers):
            for step, value in self.series.get((run, what, layer), []):
                before = steps.get(step)
                steps[step] = value if before is None or math.isnan(value) else pick(before, value)
        return sorted(steps.items())

    def per_layer(self, what: str) -> bool:
        """Whether the statistic is available for single layers."""
        return any(w == what and layer != ALL_LAYERS for _, w, layer in self.series)

    @property
    def headline(self) -> list[str]:
        """The statistics that get a chart by default."""
        found = [what for what in self.whats if not self.per_layer(what) and _HEADLINE.search(what)]
        silent = self.silent
        return [what for what in found or self.whats if what not in silent and not _PLACE.search(what)][:_MOST]

    @property
    def silent(self) -> list[str]:
        """The statistics that are 0 wherever they were measured, which a sentence tells better than a chart."""
        loud = {what for (_, what, _), points in self.series.items() if any(value for _, value in points)}
        return [what for what in self.whats if what not in loud]


def less_is_worse(what: str) -> bool:
    """Whether smaller values of a statistic are worse."""
    return _LESS_IS_WORSE.search(what) is not None


@functools.cache
def split_name(name: str) -> tuple[str, str] | None:
    """``(what, layer)`` of a metric's name, or None if it is no layer statistic. A group other than scale prefixes ``what``."""
    if not name.startswith(SCALE_PREFIX) or name.count("/") < 2:
        return None
    group, *middle, last = name.removeprefix(SCALE_PREFIX).split("/")
    prefix = "" if group == "scale" else f"{group} "
    if not middle:
        return f"{prefix}{last}".replace("_", " "), ALL_LAYERS
    if _LAYER.fullmatch(last) and not _LAYER.fullmatch(middle[0]):
        what, layer = "/".join(middle), last
    else:
        what, layer = last, "/".join(middle)
    return f"{prefix}{what}".replace("_", " "), layer


def read_scales(runs: Sequence[Run]) -> Scales:
    """Collect the layer statistics of all runs; empty if there are none."""
    found = Scales()
    for i, run in enumerate(runs):
        for step in sorted(run.steps):
            for name, raw in run.steps[step].items():
                split, value = split_name(name), number(raw)
                if split and value is not None:
                    found.series.setdefault((i, *split), []).append((step, value))
    found.whats = sorted({what for _, what, _ in found.series}, key=lambda what: (_importance(what), what))
    found.layers = sorted({layer for _, _, layer in found.series} - {ALL_LAYERS}, key=_natural)
    return found


def draw_scales(scales: Scales, runs: int) -> list[Drawn]:
    """One chart per headline statistic: the value over all layers, or the worst layer at each step."""
    drawn = []
    for what in scales.headline:
        known = describe(what)
        worst = "smallest of all layers" if less_is_worse(what) else "largest of all layers"
        text = "; ".join(filter(None, (known.help, worst * scales.per_layer(what))))
        key = "scale-" + what.replace(" ", "-")
        chart = Chart(key, known.title, GROUPS[3], lambda run: [], text, style=known.style, limits=known.limits)
        drawn.append(Drawn(chart, [scales.worst_layer(run, what) for run in range(runs)]))
    return drawn


def _importance(what: str) -> int:
    return next((i for i, word in enumerate(_TELLING) if word in what), len(_TELLING))


def _natural(name: str) -> list[tuple[int, int, str]]:
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name)]
