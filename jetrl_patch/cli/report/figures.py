"""The charts of the page, by Plotly: one figure of lines, one of the parts of a step, one of the layers' statistics."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from html import escape
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from jetrl_patch.cli.report.charts import ALL_LAYERS, GROUPS, Chart, Limit, Scales, Style, describe, thin, worst
from jetrl_patch.cli.report.runs import STEP_PARTS, Points, ReportError, Run, spelled

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

#: weights of the past in a running mean, which the page offers
_SMOOTH = (0.0, 0.6, 0.8, 0.9, 0.95)
_ROW, _ABOVE, _BELOW = 290, 190, 50  # pixels of a row of charts, and of what is above and below all rows
_WRONG, _GOOD, _SOFT = "#b3261e", "#04694c", "#566173"
_PART_COLORS = ("#33475f", "#c2410c", "#8fa3bb", "#d8dee7")
_AXES: dict[str, dict[str, Any]] = {
    "share": {"tickformat": ".4~%"}, "seconds": {"ticksuffix": " s"}, "db": {"ticksuffix": " dB"}, "count": {"tickformat": ",d"},
}  # fmt: skip
#: most stretches of steps in a map of layers, and values in all maps together
_STRETCHES, _VALUES = 200, 60_000


def html(figure: Figure, ident: str) -> str:
    """The figure as an element of a page that has ``script``."""
    text: str = figure.to_html(full_html=False, include_plotlyjs=False, div_id=ident, config={"displaylogo": False})
    return f'<div class="scroll">{text}</div>'


def script() -> str:
    """Plotly's JavaScript library. Raises ReportError if Plotly is not installed."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ReportError(f"report.html needs plotly, which is not installed ({error}). Run pip install plotly.") from error
    text: str = get_plotlyjs()
    return text


def lines(runs: Sequence[Run], styles: Sequence[Style], drawn: Sequence[Chart]) -> Figure:
    """All charts in two columns, each group in rows of its own, with one x axis, one legend and one choice of smoothing."""
    from plotly.subplots import make_subplots

    groups = [same for group in GROUPS if (same := [chart for chart in drawn if chart.group == group])]
    cells = [chart for group in groups for chart in (*group, *[None] * (len(group) % 2))]
    rows = len(cells) // 2
    plots: list[dict[str, Any] | None] = [{} if chart else None for chart in cells]
    figure = make_subplots(
        rows, 2, specs=[*zip(plots[::2], plots[1::2], strict=True)], shared_xaxes="all",
        subplot_titles=[_title(chart, first=chart is group[0]) for group in groups for chart in group],
        horizontal_spacing=0.07, vertical_spacing=100 / (_ROW * rows),
    )  # fmt: skip
    smoothed: list[list[list[float | None]]] = [[] for _ in _SMOOTH]
    places: dict[str, list[list[float]]] = {"step": [], "tokens": [], "minutes": []}
    seen, sums = set(), [_sums(run) for run in runs]
    for i, chart in enumerate(cells):
        if chart is None:
            continue
        where = {"row": i // 2 + 1, "col": i % 2 + 1}
        position = _axis(figure, chart, where)
        for run, style, totals, series in zip(runs, styles, sums, chart.series, strict=True):
            if not series:
                continue
            points = thin(series)
            values, by = [value for _, value in points], _places(totals, points)
            for level, weight in zip(smoothed, _SMOOTH, strict=True):
                level.append(list(map(position, _mean(values, weight))))
            for name, found in by.items():
                places[name].append(found)
            figure.add_scatter(
                x=by["step"], y=smoothed[0][-1], name=escape(run.label), legendgroup=run.label, showlegend=run.label not in seen,
                mode="lines+markers" if len(points) <= 12 else "lines", customdata=[(step, chart.text(v)) for step, v in points],
                line={"color": style.color, "dash": ",".join(f"{part}px" for part in style.dash) or "solid"},
                hovertemplate="%{customdata[1]} at step %{customdata[0]}", **where,
            )  # fmt: skip
            seen.add(run.label)
            for step, text in [(step, str(spelled(value))) for step, value in points if not math.isfinite(value)]:
                figure.add_annotation(x=step, y=1, yref="y domain", text="×", hovertext=f"{escape(run.label)}: {text}",
                                      showarrow=False, font={"color": style.color, "size": 16}, **where)  # fmt: skip
    height = _ROW * rows
    _controls(figure, smoothed, {name: found for name, found in places.items() if any(map(any, found))}, height)
    figure.update_xaxes(showticklabels=True)
    figure.update_layout(**_look(height + _ABOVE + _BELOW), margin={"l": 60, "r": 20, "t": _ABOVE, "b": _BELOW})
    figure.update_layout(legend={"orientation": "h", "y": 1 + 130 / height, "yanchor": "bottom", "groupclick": "togglegroup"})
    return figure


def parts(runs: Sequence[Run]) -> Figure | None:
    """The mean seconds of a step's parts, as one stacked bar per run; None if no run has them."""
    from plotly.graph_objects import Figure

    known = {escape(run.label): found for run in runs if (found := run.parts)}
    if not known:
        return None
    figure = Figure()
    for name, color in zip((*STEP_PARTS, "other"), _PART_COLORS, strict=True):
        seconds = [found[name] for found in known.values()]
        shares = [found[name] / sum(found.values()) for found in known.values()]
        texts = [f"{value:.2f} s ({share:.0%})" for value, share in zip(seconds, shares, strict=True)]
        figure.add_bar(x=seconds, y=[*known], name=name, orientation="h", marker_color=color, text=texts,
                       hovertemplate=f"{name}: %{{text}}<extra>%{{y}}</extra>")  # fmt: skip
    figure.update_layout(**_look(150 + 40 * len(known)), barmode="stack", legend={"orientation": "h", "traceorder": "normal"})
    figure.update_xaxes(title="mean seconds per step")
    figure.update_yaxes(autorange="reversed", automargin=True)
    return figure


def layers(runs: Sequence[Run], scales: Scales) -> Figure | None:
    """A statistic of every layer at every step as a map, with a choice of run and statistic; None without such statistics.

    Where a run has measured many steps, a column is the worst value of a stretch of them.
    """
    from plotly.graph_objects import Figure

    whats = [what for what in scales.series if scales.per_layer(what)]
    if not whats:
        return None
    figure, choices = Figure(), []
    most = max(8, min(_STRETCHES, _VALUES // (len(whats) * len(runs) * len(scales.layers))))
    for what in whats:
        for i, run in enumerate(runs):
            found = {layer: series[i] for layer, series in scales.series[what].items() if series[i] and layer != ALL_LAYERS}
            if not found:
                continue
            steps = sorted({step for points in found.values() for step, _ in points})
            ends = [steps[(k + 1) * len(steps) // min(most, len(steps)) - 1] for k in range(min(most, len(steps)))]
            rows = [_stretches(what, points, ends) for points in found.values()]
            chart = describe(what)
            choices.append(f"{chart.title}, {run.label}" if len(runs) > 1 else chart.title)
            figure.add_heatmap(x=ends, y=[*found], z=rows, visible=len(choices) == 1, colorscale="Cividis",
                               text=[list(map(chart.text, row)) for row in rows],
                               hovertemplate="%{y}<br>step %{x}: %{text}<extra></extra>")  # fmt: skip
    buttons = [
        {"label": escape(name), "method": "restyle", "args": ["visible", [k == i for k in range(len(choices))]]}
        for i, name in enumerate(choices)
    ]
    figure.update_layout(
        **_look(200 + 16 * min(80, len(scales.layers))), margin={"t": 80},
        updatemenus=[{"buttons": buttons, "x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom", "pad": {"b": 12}}],
    )  # fmt: skip
    figure.update_xaxes(title="step")
    figure.update_yaxes(automargin=True, type="category", categoryorder="array", categoryarray=scales.layers[::-1])
    return figure


def _look(height: int) -> dict[str, Any]:
    return {"height": height, "template": "plotly_white", "hovermode": "closest", "font": {"color": "#16202e"}}


def _title(chart: Chart, first: bool) -> str:
    """A chart's title with what it shows in small print; the first of a group is headed by the group's name."""
    small = "".join(f'<br><span style="font-size:11px;color:{_SOFT}">{escape(line)}</span>' for line in wrap(chart.help, 84))
    return f'<span style="color:{_SOFT}">{chart.group}</span><br>' * first + f"<b>{escape(chart.title)}</b>{small}"


def _axis(figure: Figure, chart: Chart, where: dict[str, int]) -> Callable[[float], float | None]:
    """Set the vertical axis of a chart, and return where a value lies on it; None for a gap."""
    values = [value for points in chart.series for _, value in points if math.isfinite(value)]
    if chart.log:
        return _log_axis(figure, values, where)
    figure.update_yaxes(**_AXES.get(chart.style, {}), **where)
    if values:
        low, high, limits = chart.ends(min(values), max(values))
        figure.update_yaxes(range=[low, high + 0.02 * (high - low)], **where)
        for limit in chart.limits:
            _limit(figure, limit, limit in limits, where)
    return lambda value: value if math.isfinite(value) else None


def _limit(figure: Figure, limit: Limit, inside: bool, where: dict[str, int]) -> None:
    """A threshold as a line, or as a remark where the axis does not reach it."""
    if inside:
        look = {"line": {"color": _WRONG, "dash": "dash", "width": 1}, "annotation_font_color": _WRONG}
        figure.add_hline(limit.value, annotation_text=limit.name, **look, **where, exclude_empty_subplots=False)
    else:
        figure.add_annotation(x=1, xref="x domain", y=0, yref="y domain", text=f"{limit.name} is outside", showarrow=False,
                              xanchor="right", yanchor="bottom", font={"color": _WRONG}, **where)  # fmt: skip


def _log_axis(figure: Figure, values: Sequence[float], where: dict[str, int]) -> Callable[[float], float | None]:
    """A logarithmic axis. Values of 0 have a band of their own below the smallest decade."""
    positive = [value for value in values if value > 0]
    low = math.floor(math.log10(min(positive, default=1e-6)))
    high = max(low + 1, math.ceil(math.log10(max(positive, default=1.0))))
    zero, bottom = 10 ** (low - 0.6), low - (1 if len(positive) < len(values) else 0)
    decades = range(low, high + 1, math.ceil((high - low) / 8))
    marks = [(zero, "0")] * (bottom < low) + [(10.0**decade, f"10<sup>{decade}</sup>") for decade in decades]
    ends = [bottom, high + 0.05]
    at, names = map(list, zip(*marks, strict=True))
    figure.update_yaxes(type="log", range=ends, tickvals=at, ticktext=names, **where)
    if bottom < low:
        look = {"fillcolor": _GOOD, "opacity": 0.08, "line_width": 0}
        figure.add_hrect(10.0**bottom, 10 ** (low - 0.2), **look, **where, exclude_empty_subplots=False)
    return lambda value: None if not math.isfinite(value) else value if value > 0 else zero


def _controls(
    figure: Figure, smoothed: list[list[list[float | None]]], places: dict[str, list[list[float]]], height: int
) -> None:
    """Buttons for the horizontal axis and a slider for smoothing, above the charts."""
    buttons = [
        {"label": name, "method": "update", "args": [{"x": found}, {"xaxis.autorange": True}]} for name, found in places.items()
    ]
    steps = [
        {"label": f"{weight:g}" if weight else "off", "method": "restyle", "args": [{"y": found}]}
        for weight, found in zip(_SMOOTH, smoothed, strict=True)
    ]
    up = 1 + 105 / height
    menu = {"type": "buttons", "direction": "right", "x": 0, "xanchor": "left", "y": up, "yanchor": "middle", "showactive": True}
    slider = {"steps": steps, "x": 0.55, "len": 0.45, "y": up + 20 / height, "yanchor": "middle", "pad": {"t": 0},
              "currentvalue": {"prefix": "running mean: "}}  # fmt: skip
    figure.update_layout(sliders=[slider], updatemenus=[{**menu, "buttons": buttons}] if len(buttons) > 1 else [])


def _sums(run: Run) -> dict[str, Points]:
    """The tokens and the minutes up to each step; [] if the run has none."""
    return {"tokens": run.tokens, "minutes": [(step, total / 60) for step, total in run.time]}


def _places(sums: dict[str, Points], points: Points) -> dict[str, list[float]]:
    """Where points lie on each horizontal axis: by their step, and by the ``sums`` up to it; [] for sums that are missing."""
    found = {"step": [float(step) for step, _ in points]}
    for name, known in sums.items():
        steps, totals = [step for step, _ in known], [0.0, *(total for _, total in known)]
        found[name] = [totals[bisect.bisect_right(steps, step)] for step, _ in points] if known else []
    return found


def _mean(values: Sequence[float], weight: float) -> list[float]:
    """A running mean with ``weight`` on the past, corrected for its start; what is not finite stays as it is."""
    total, known, found = 0.0, 0.0, []
    for value in values:
        if math.isfinite(value):
            total, known = weight * total + (1 - weight) * value, weight * known + 1 - weight
        found.append(total / known if weight and math.isfinite(value) else value)
    return found


def _stretches(what: str, points: Points, ends: Sequence[int]) -> list[float]:
    """The worst value up to each step of ``ends``, after the one before; NaN where none was measured."""
    found: list[Points] = [[] for _ in ends]
    for step, value in points:
        found[bisect.bisect_left(ends, step)].append((step, value))
    return [worst(what, inside) if inside else math.nan for inside in found]
