"""What the FP8 statistics mean: title, explanation, unit and threshold of the monitor's figures, by their names."""

from __future__ import annotations

import re
from dataclasses import dataclass

from jetrl_patch.config.fields import Fields

__all__ = ["Described", "Limit", "describe"]


@dataclass(frozen=True)
class Limit:
    """A threshold, drawn as a line."""

    value: float
    name: str


@dataclass(frozen=True)
class Described:
    """How a statistic is shown. ``style`` is a style of ``charts.Chart``."""

    title: str
    help: str = ""
    style: str = "number"
    limits: tuple[Limit, ...] = ()


#: figure -> title, explanation, style. The names are those of ``monitor.figures.Figures`` with spaces
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
    "worst expert": ("worst expert", "number of the expert with the lowest SQNR, at the step where it was lowest", "count"),
}
_NAME = re.compile(rf"(weight|activation|gradient) ({'|'.join(_FIGURES)})(?: (min|mean|max))?")
_OVER = {"min": ", lowest layer", "max": ", highest layer", "mean": ", mean of the layers"}

#: what the monitor warns about, with the thresholds that hold unless a run sets others
_LIMITS = {
    "sqnr": Limit(Fields.monitor_sqnr, f"monitor_sqnr {Fields.monitor_sqnr:g} dB"),
    "slice sqnr": Limit(Fields.monitor_sqnr, f"monitor_sqnr {Fields.monitor_sqnr:g} dB"),
    "underflow": Limit(Fields.monitor_underflow, f"monitor_underflow {Fields.monitor_underflow:.0%}"),
}


def describe(what: str) -> Described:
    """A statistic as ``scales.split_name`` names it; one that is not the monitor's keeps its name."""
    found = _NAME.fullmatch(what)
    if found is None:
        return Described(what, style="db" if re.search(r"\bs(q)?nr( db)?\b", what) else "number")
    kind, figure, over = found.groups()
    title, text, style = _FIGURES[figure]
    limits = (_LIMITS[figure],) if figure in _LIMITS else ()
    return Described(f"{kind.capitalize()} {title}{_OVER.get(over, '')}", text, style, limits)
