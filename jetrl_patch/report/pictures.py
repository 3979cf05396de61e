"""Learning and mismatch over the steps, as PNG pictures. Needs matplotlib, which is imported when a picture is drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jetrl_patch.report.runs import ReportError, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["colour", "draw_learning", "draw_mismatch"]

COLOURS = {
    "bf16": "#6b7280",
    "fp8-rollout": "#d97706",
    "fp8-unified/linear": "#7c3aed",
    "fp8-unified/exact": "#059669",
}
_SPARE = ("#2563eb", "#db2777", "#0891b2", "#65a30d")
_DASHES = ("-", "--", ":", "-.")


def colour(arm: str, position: int = 0) -> str:
    """The colour of one arm, the same in every picture; unknown arms take spare ones by their position."""
    return COLOURS.get(arm, _SPARE[position % len(_SPARE)])


def draw_learning(runs: Sequence[Run], path: Path) -> None:
    """Two panels side by side: reward of the training batches, and accuracy on held-out questions."""
    figure, (left, right) = _figure(2)
    for run, style in _styles(runs):
        _line(left, run.reward, **style)
        _line(right, run.accuracy, marker="o", markersize=4, **style)
    left.set(title="Reward of the training batch", xlabel="step", ylim=(0, 1.02))
    right.set(title="Accuracy on held-out questions (greedy)", xlabel="step", ylim=(0, 1.02))
    _legend(figure, right)
    _save(figure, path)


def draw_mismatch(runs: Sequence[Run], path: Path) -> None:
    """Two panels on a log scale with a band of its own for 0: mean and largest \\|Δlogp\\| of each step."""
    figure, panels = _figure(2)
    names = ("jetrl/logp_abs_diff_mean", "jetrl/logp_abs_diff_max")
    titles = ("Mean |Δ log-prob| between rollout and trainer", "Largest |Δ log-prob| between rollout and trainer")
    for axes, name, title in zip(panels, names, titles, strict=True):
        positive = [v for run in runs for _, v in run.series(name) if v > 0 and math.isfinite(v)]
        floor = 10.0 ** (math.floor(math.log10(min(positive))) if positive else -6)
        top = 10.0 ** (math.ceil(math.log10(max(positive)) + 0.1) if positive else 0)
        for run, style in _styles(runs):
            _line(axes, run.series(name), **style)
        # linear from 0 to the floor, logarithmic above: a true zero has a place, at the bottom
        axes.set_yscale("symlog", linthresh=floor, linscale=0.5)
        decades = range(round(math.log10(floor)), round(math.log10(top)) + 1)
        axes.set_yticks([0.0, *(10.0**d for d in decades)], ["0", *(f"$10^{{{d}}}$" for d in decades)])
        axes.yaxis.minorticks_off()
        axes.axhspan(-floor * 0.25, floor * 0.5, color="#059669", alpha=0.07, linewidth=0)
        axes.annotate("equal to the last bit", (0.02, 0.0), (0, 4), xycoords=("axes fraction", "data"),
                      textcoords="offset points", fontsize=8, color="#047857")  # fmt: skip
        axes.set(title=title, xlabel="step", ylim=(-floor * 0.25, top))
    _legend(figure, panels[0])
    _save(figure, path)


def _styles(runs: Sequence[Run]) -> list[tuple[Run, dict[str, Any]]]:
    """Colour by arm, dashes by seed; the legend names the seed only when an arm has several."""
    arms = list(dict.fromkeys(run.arm for run in runs))
    styles = []
    for run in runs:
        seeds = sorted({other.seed for other in runs if other.arm == run.arm})
        nth = seeds.index(run.seed)
        label = run.arm if len(seeds) == 1 else f"{run.arm}, seed {run.seed}"
        style = {"color": colour(run.arm, arms.index(run.arm)), "linestyle": _DASHES[nth % len(_DASHES)]}
        styles.append((run, {**style, "label": label}))
    return styles


def _line(axes: Axes, points: Sequence[tuple[int, float]], **style: Any) -> None:
    if points:
        axes.plot([step for step, _ in points], [value for _, value in points], linewidth=1.6, **style)


def _legend(figure: Any, axes: Axes) -> None:
    """One legend under all panels."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8)


def _figure(columns: int) -> tuple[Any, Any]:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ReportError(f"pictures need matplotlib, found none ({error}); pip install matplotlib") from error
    figure = Figure(figsize=(5.6 * columns, 4.2), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, columns)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.title.set_fontsize(10)
        axes.tick_params(labelsize=8)
    return figure, panels


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
