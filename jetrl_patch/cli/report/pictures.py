"""The report's charts as PNG files, for documents. Drawing imports matplotlib."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jetrl_patch.cli.report.charts import Chart, Scales, Style, choose, draw, thin
from jetrl_patch.cli.report.runs import STEP_PARTS, ReportError, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: file -> keys of its charts
_PICTURES = {
    "learning.png": ("reward", "accuracy"),
    "mismatch.png": ("mismatch-mean", "mismatch-max"),
    "agreement.png": ("k3", "bit-equal", "ess", "clipped", "masked"),
    "time.png": ("seconds",),
}
_PART_LOOKS = (("#33475f", ""), ("#ffffff", "////"), ("#8fa3bb", ""), ("#e5e9ef", ".."))  # color and hatching
_LOOK = {
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.grid.axis": "y", "axes.axisbelow": True,
    "axes.titlesize": 10, "grid.color": "#e5e7eb", "xtick.labelsize": 8, "ytick.labelsize": 8, "lines.linewidth": 1.7,
    "lines.markersize": 3.5, "lines.scale_dashes": False, "legend.frameon": False, "legend.fontsize": 8,
}  # fmt: skip
_FEW = 12  # lines of at most this many points get markers


def draw_pictures(runs: Sequence[Run], folder: Path) -> list[Path]:
    """Draw every picture for which a run has data, and return the files. Raises ReportError without matplotlib."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
        from matplotlib.lines import Line2D
    except ImportError as error:
        raise ReportError(f"pictures need matplotlib, which is not installed ({error}). Run pip install matplotlib.") from error
    drawn, scales, styles = {chart.key: chart for chart in draw(runs)}, Scales(runs), choose(runs)
    pictures = {name: [drawn[key] for key in keys if key in drawn] for name, keys in _PICTURES.items()}
    pictures["scales.png"] = [scales.chart(what) for what in scales.headline]
    made = []
    for name, charts in pictures.items():
        if not charts:
            continue
        bars = name == "time.png" and any(run.parts for run in runs)
        count = len(charts) + bars
        rows, columns = math.ceil(count / 2), min(2, count)
        with rc_context(_LOOK):
            figure = Figure((5.6 * columns, 3.9 * rows + 0.3), dpi=130, layout="constrained")
            grid = list(figure.subplots(rows, columns, squeeze=False).flat)
            for axes, chart in zip(grid, charts, strict=False):
                _draw(axes, chart, styles)
            if bars:
                _parts(grid[1], runs)
            for axes in grid[count:]:
                axes.set_visible(False)
            having = [i for i in range(len(runs)) if any(chart.series[i] for chart in charts)]
            lines = [Line2D([], [], label=runs[i].label, **_line(styles[i])) for i in having]
            figure.legend(handles=lines, loc="outside lower center", ncols=4)
            figure.savefig(folder / name)
        made.append(folder / name)
    return made


def _line(style: Style) -> dict[str, Any]:
    # dashes on top show where two runs coincide
    return {"color": style.color, "linestyle": (0, style.dash) if style.dash else "-", "zorder": 3 if style.dash else 2}


def _draw(axes: Axes, chart: Chart, styles: Sequence[Style]) -> None:
    between = " between rollout and trainer" if chart.key.startswith("mismatch") else ""
    axes.set(title=chart.title + between, xlabel="step")
    for style, points in zip(styles, map(thin, chart.series), strict=True):
        marker = "o" if len(points) <= _FEW else ""
        axes.plot([s for s, _ in points], [v for _, v in points], marker=marker, **_line(style))
        bad = [s for s, v in points if not math.isfinite(v)]  # crosses at the edge, as on the page
        if bad:
            edge = {"transform": axes.get_xaxis_transform(), "clip_on": False, "color": style.color, "markersize": 6}
            axes.plot(bad, [1.0] * len(bad), "x", **edge)
    axes.xaxis.get_major_locator().set_params(integer=True)
    values = [value for points in chart.series for _, value in points if math.isfinite(value)]
    if chart.log:
        _log_axis(axes, values, "equal to the last bit" if between else "exactly 0")
    elif values:
        _linear_axis(axes, chart, min(values), max(values))


def _linear_axis(axes: Axes, chart: Chart, least: float, most: float) -> None:
    """Draw the chart's limits, and end the axis where the chart says, else at the data."""
    low, high, limits = chart.ends(least, most)
    for limit in limits:
        axes.axhline(limit.value, color="#b3261e", linestyle=(0, (5, 4)), linewidth=1)
        axes.annotate(limit.name, (1, limit.value), (0, 3), xycoords=("axes fraction", "data"),
                      textcoords="offset points", ha="right", fontsize=8, color="#b3261e")  # fmt: skip
    axes.set_ylim(low, high + 0.02 * (high - low))
    if chart.style == "share":
        from matplotlib.ticker import PercentFormatter

        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    else:
        axes.ticklabel_format(axis="y", useOffset=False)
        if chart.style == "db":
            axes.yaxis.set_major_formatter("{x:g} dB")


def _log_axis(axes: Axes, values: Sequence[float], word: str) -> None:
    """Make the axis logarithmic. With values of 0, it is linear below the smallest decade and has 0 at the bottom."""
    positive = [value for value in values if value > 0]
    if len(positive) == len(values):
        axes.set_yscale("log")
        return
    floor = 10.0 ** math.floor(math.log10(min(positive, default=1e-6)))
    axes.set_yscale("symlog", linthresh=floor, linscale=0.5)
    axes.set_ylim(-floor / 4, 2 * max(positive, default=0.5))
    axes.axhspan(-floor / 4, floor / 2, color="#04694c", alpha=0.08, linewidth=0)
    axes.annotate(word, (0.02, 0.0), (0, 4), xycoords=("axes fraction", "data"), textcoords="offset points", fontsize=8,
                  color="#04694c")  # fmt: skip


def _parts(axes: Axes, runs: Sequence[Run]) -> None:
    """The parts of a step as one stacked bar per run."""
    known = {run.label: run.parts for run in runs if run.parts}
    left = [0.0] * len(known)
    for name, (color, hatch) in zip((*STEP_PARTS, "other"), _PART_LOOKS, strict=True):
        widths = [parts[name] for parts in known.values()]
        axes.barh(list(known), widths, left=left, label=name, color=color, hatch=hatch, edgecolor="#4a5567", height=0.62)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.grid(visible=False)
    axes.set(title="Parts of a step", xlabel="mean seconds per step")
    axes.legend(ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.14))
