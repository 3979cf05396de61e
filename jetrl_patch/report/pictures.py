"""The report's charts as PNG files, for documents. Drawing imports matplotlib."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jetrl_patch.report.charts import Chart, Drawn, draw
from jetrl_patch.report.runs import PARTS, Points, ReportError, Run
from jetrl_patch.report.scales import draw_scales, read_scales
from jetrl_patch.report.series import thin
from jetrl_patch.report.styles import DASHES, LIGHT, Style, choose

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_learning", "draw_mismatch", "draw_pictures"]

#: file -> keys of its charts
_PICTURES = {
    "learning.png": ("reward", "accuracy"),
    "mismatch.png": ("mismatch-mean", "mismatch-max"),
    "agreement.png": ("k3", "bit-equal", "ess", "clipped", "masked"),
}
_PART_COLOURS = (("#33475f", ""), ("#ffffff", "////"), ("#8fa3bb", ""), ("#e5e9ef", ".."))
_FEW = 12  # lines of at most this many points get markers


def draw_pictures(runs: Sequence[Run], folder: Path) -> list[Path]:
    """Draw every picture for which a run has data, and return the files.

    Raises:
        ReportError: matplotlib is missing.
    """
    drawn = {d.chart.key: d for d in draw(runs)}
    styles = choose(runs)
    made = []
    for name, keys in _PICTURES.items():
        made += _panels(runs, styles, [drawn[key] for key in keys if key in drawn], folder / name)
    made += _time(runs, styles, drawn.get("seconds"), folder / "time.png")
    made += _panels(runs, styles, draw_scales(read_scales(runs), len(runs)), folder / "scales.png")
    return made


def draw_learning(runs: Sequence[Run], path: Path) -> None:
    """Draw the reward of the training batches and the accuracy on held-out questions."""
    _some(runs, ("reward", "accuracy"), path)


def draw_mismatch(runs: Sequence[Run], path: Path) -> None:
    """Draw mean and largest \\|Δlogp\\| of each step on a log scale, with a separate band for 0."""
    _some(runs, ("mismatch-mean", "mismatch-max"), path)


def _some(runs: Sequence[Run], keys: Sequence[str], path: Path) -> None:
    drawn = [d for d in draw(runs) if d.chart.key in keys]
    if not drawn:
        raise ReportError(f"{path.name}: none of the runs has {' or '.join(keys)}")
    _panels(runs, choose(runs), drawn, path)


def _panels(runs: Sequence[Run], styles: Sequence[Style], drawn: Sequence[Drawn], path: Path) -> list[Path]:
    if not drawn:
        return []
    figure, panels = _figure(len(drawn))
    for axes, one in zip(panels, drawn, strict=True):
        _chart(axes, one, runs, styles)
    _legend(figure, panels)
    return [_save(figure, path)]


def _chart(axes: Axes, drawn: Drawn, runs: Sequence[Run], styles: Sequence[Style]) -> None:
    chart = drawn.chart
    between = " between rollout and trainer" if chart.key.startswith("mismatch") else ""
    axes.set(title=chart.title + between, xlabel="step")
    for run, style, whole in zip(runs, styles, drawn.series, strict=True):
        points = thin(whole)
        if points:
            marker = {"marker": "o", "markersize": 3.5} if len(points) <= _FEW else {}
            axes.plot([s for s, _ in points], [v for _, v in points], label=run.label, **_line(style), **marker)
        bad = [s for s, v in points if not math.isfinite(v)]
        if bad:  # crosses at the edge, as on the page
            axes.plot(
                bad,
                [1.0] * len(bad),
                "x",
                color=LIGHT[style.colour],
                clip_on=False,
                transform=axes.get_xaxis_transform(),
            )
    axes.xaxis.get_major_locator().set_params(integer=True)
    if chart.log:
        _log_axis(axes, drawn.series, "equal to the last bit" if between else "exactly 0")
        return
    values = [value for points in drawn.series for _, value in points if math.isfinite(value)]
    for limit in chart.limits:
        if _near(limit.value, chart, values):
            axes.axhline(limit.value, color="#b3261e", linestyle=(0, (5, 4)), linewidth=1)
            axes.annotate(limit.name, (1, limit.value), (0, 3), xycoords=("axes fraction", "data"),
                          textcoords="offset points", ha="right", fontsize=8, color="#b3261e")  # fmt: skip
    _ends(axes, chart, values)
    if chart.style == "share":
        from matplotlib.ticker import PercentFormatter

        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    elif chart.style == "db":
        axes.yaxis.set_major_formatter("{x:g} dB")
    elif axes.yaxis.get_major_formatter().__class__.__name__ == "ScalarFormatter":
        axes.ticklabel_format(axis="y", useOffset=False)


def _ends(axes: Axes, chart: Chart, values: Sequence[float]) -> None:
    """Set the ends of the vertical axis: those of the chart, else those of the data, but none that cannot occur."""
    low, high = axes.get_ylim()
    if chart.low is not None and chart.high is not None:
        low, high = chart.low, chart.high + 0.02 * (chart.high - chart.low)
    elif chart.low is not None:
        low = chart.low
    elif values and min(values) >= 0:
        low = max(0.0, low)
    if chart.high is None and chart.style == "share" and values and max(values) <= 1:
        high = min(1.0, high)
    axes.set_ylim(low, high)


def _near(limit: float, chart: Chart, values: Sequence[float]) -> bool:
    """Whether a threshold is close enough to the values to be drawn without flattening them, as on the page."""
    if chart.style == "db" or not values:
        return True
    reach = 4 * (max(values) - min(values))
    return min(values) - reach <= limit <= max(values) + reach


def _log_axis(axes: Axes, series: Sequence[Points], word: str) -> None:
    """Make the axis linear from 0 to the smallest decade and logarithmic above, so that 0 is at the bottom."""
    values = [v for points in series for _, v in points if math.isfinite(v)]
    positive = [v for v in values if v > 0]
    floor = 10.0 ** (math.floor(math.log10(min(positive))) if positive else -6)
    top = 10.0 ** (math.ceil(math.log10(max(positive)) + 0.1) if positive else 0)
    zero = any(v <= 0 for v in values)
    axes.set_yscale("symlog", linthresh=floor, linscale=0.5)
    decades = range(round(math.log10(floor)), round(math.log10(top)) + 1)
    shown = decades[:: max(1, math.ceil(len(decades) / 9))]
    axes.set_yticks([*([0.0] if zero else []), *(10.0**d for d in shown)],
                    [*(["0"] if zero else []), *(f"$10^{{{d}}}$" for d in shown)])  # fmt: skip
    axes.yaxis.minorticks_off()
    axes.set_ylim(-floor * 0.25 if zero else floor, top)
    if zero:
        axes.axhspan(-floor * 0.25, floor * 0.5, color="#04694c", alpha=0.08, linewidth=0)
        axes.annotate(word, (0.02, 0.0), (0, 4), xycoords=("axes fraction", "data"),
                      textcoords="offset points", fontsize=8, color="#04694c")  # fmt: skip


def _time(runs: Sequence[Run], styles: Sequence[Style], seconds: Drawn | None, path: Path) -> list[Path]:
    """Draw the seconds of every step, and the parts of a step as one stacked bar per run."""
    known = [(run.label, parts) for run in runs if (parts := run.parts)]
    if seconds is None:
        return []
    figure, panels = _figure(2 if known else 1)
    _chart(panels[0], seconds, runs, styles)
    _legend(figure, panels[:1])
    if known:
        axes = panels[1]
        left = [0.0] * len(known)
        for name, (colour, hatch) in zip((*PARTS, "other"), _PART_COLOURS, strict=True):
            widths = [parts[name] for _, parts in known]
            axes.barh([label for label, _ in known], widths, left=left, label=name, color=colour, hatch=hatch,
                      edgecolor="#4a5567", linewidth=0.7, height=0.62)  # fmt: skip
            left = [a + b for a, b in zip(left, widths, strict=True)]
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set(title="Parts of a step", xlabel="mean seconds per step")
        axes.legend(fontsize=8, frameon=False, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.14))
    return [_save(figure, path)]


def _line(style: Style) -> dict[str, Any]:
    dash = DASHES[style.dash]
    return {
        "zorder": 3 if dash else 2,  # dashes on top show where two runs coincide
        "color": LIGHT[style.colour],
        "linestyle": (0, tuple(d / 2 for d in dash)) if dash else "-",
        "linewidth": 1.7,
    }


def _legend(figure: Any, panels: Sequence[Axes]) -> None:
    """Draw one legend under all panels."""
    found: dict[str, Any] = {}
    for axes in panels:
        handles, labels = axes.get_legend_handles_labels()
        found |= dict(zip(labels, handles, strict=True))
    if found:
        figure.legend(list(found.values()), list(found), loc="outside lower center", ncols=4, frameon=False, fontsize=8)


def _figure(panels: int) -> tuple[Any, Any]:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ReportError(f"pictures need matplotlib, which is not installed ({error}). Run pip install matplotlib.") from error
    columns, rows = min(2, panels), math.ceil(panels / 2)
    figure = Figure(figsize=(5.6 * columns, 3.9 * rows + 0.3), dpi=130, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    grid = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in grid[panels:]:
        axes.set_visible(False)
    for axes in grid[:panels]:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.title.set_fontsize(10)
        axes.tick_params(labelsize=8)
    return figure, grid[:panels]


def _save(figure: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path
