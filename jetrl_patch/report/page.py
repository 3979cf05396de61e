"""The report as one self-contained HTML file: styles, data and script are inline, and nothing is fetched."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from jetrl_patch.report.charts import GROUPS, Chart, Drawn, draw, steady
from jetrl_patch.report.described import describe
from jetrl_patch.report.runs import Points, Run
from jetrl_patch.report.scales import ALL_LAYERS, Scales, draw_scales, less_is_worse, read_scales
from jetrl_patch.report.series import LIMIT, short, thin
from jetrl_patch.report.styles import DARK, DASHES, LIGHT, Style, choose
from jetrl_patch.report.tables import shown_columns, versions_text
from jetrl_patch.report.tables_html import (
    answers_table,
    cards,
    layers_table,
    one_environment,
    parts_table,
    steady_table,
    summary_table,
    swatch,
)

__all__ = ["make_page"]

#: budget of points for all per-layer lines together, shared equally among them
_SCALE_POINTS = 60_000

_FOLDER = Path(__file__).parent


def make_page(
    runs: Sequence[Run],
    summaries: Sequence[dict[str, Any]],
    title: str,
    subtitle: str,
    notes: Sequence[str] = (),
    answers: Sequence[dict[str, Any]] = (),
    changed: Mapping[str, int] | None = None,
    live: int = 0,
) -> str:
    """The HTML of the page.

    Args:
        summaries: one summary per run, in the order of the runs.
        notes: warnings for the reader, such as skipped lines.
        answers: the model's answers before and after training; if empty, the page has no such section.
        changed: how many answers became right and wrong, for ``tables.changes_text``.
        live: interval in seconds at which the page loads itself anew; 0 for a finished page.
    """
    styles, scales = choose(runs), read_scales(runs)
    drawn = [*draw(runs), *draw_scales(scales, len(runs))]
    swatches = [swatch(style) for style in styles]
    template = Template((_FOLDER / "page.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=escape(title),
        subtitle=escape(subtitle),
        style=_style(),
        live_note=_LIVE.format(seconds=live) if live else "",
        notes=_notes(notes),
        cards=cards(summaries),
        toggles="".join(_toggle(i, run, swatches[i]) for i, run in enumerate(runs)),
        bys=_bys(runs),
        summary=summary_table(summaries, swatches),
        charts=_sections(drawn, scales, summaries, swatches),
        answers=answers_table(answers, changed or {}),
        legend="".join(
            f"<dt>{escape(c.title)}</dt><dd>{escape(c.help)}</dd>" for c in shown_columns(summaries) if c.help
        ),
        versions=escape(_versions(summaries)),
        data=_data(runs, styles, drawn, scales),
        axes=_script("axes"),
        drawing=_script("chart"),
        behaviour=_script("behaviour"),
        live=_script("live") if live else "",
    )


_LIVE = (
    '<p class="note live" id="live" data-seconds="{seconds}">Live: loads itself anew every {seconds} s. '
    '<button type="button">Pause</button></p>'
)


def _script(name: str) -> str:
    return (_FOLDER / f"{name}.html").read_text(encoding="utf-8")


def _bys(runs: Sequence[Run]) -> str:
    """The choices for the x axis: steps, and what at least one run can be drawn by."""
    known = {"step": "steps", "tokens": "sampled tokens", "time": "time"}
    having = {"step": True, "tokens": any(run.tokens for run in runs), "time": any(run.time for run in runs)}
    return "".join(f'<option value="{name}">{text}</option>' for name, text in known.items() if having[name])


def _style() -> str:
    light, dark = (" ".join(f"--run{i}: {c};" for i, c in enumerate(colours)) for colours in (LIGHT, DARK))
    text = (_FOLDER / "style.html").read_text(encoding="utf-8")
    return Template(text).substitute(light=light, dark=dark)


def _notes(notes: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f'<div class="note" role="note"><ul>{items}</ul></div>' if items else ""


def _toggle(position: int, run: Run, line: str) -> str:
    return f'<label><input type="checkbox" value="{position}" checked>{line}<span>{escape(run.label)}</span></label>'


def _sections(drawn: Sequence[Drawn], scales: Scales, summaries: Sequence[dict[str, Any]], swatches: list[str]) -> str:
    """The charts by group; the last group is collapsed, and what never changes in it is a list."""
    parts = []
    for group in GROUPS:
        here = [(i, d) for i, d in enumerate(drawn) if d.chart.group == group]
        still = [(d.chart, value) for _, d in here if (value := steady(d)) is not None and d.chart.group == GROUPS[-1]]
        figures = "".join(_figure(i, d.chart) for i, d in here if d.chart not in [chart for chart, _ in still])
        grid = f'<div class="grid">{figures}</div>' if figures else ""
        if group == "FP8 statistics":
            grid += _scales(scales, summaries, swatches)
        if group == GROUPS[-1]:
            grid += steady_table([(chart.title, chart.help, f"{value:,.10g}") for chart, value in still])
            grid = grid and f"<details><summary>Show {figures.count('<figure')} charts</summary>{grid}</details>"
        if group == "Time":
            grid += parts_table(summaries, swatches)
        if grid:
            parts.append(f"<h2>{escape(group)}</h2>{grid}")
    return "".join(parts)


def _figure(position: int | str, chart: Chart) -> str:
    return (
        f'<figure data-chart="{position}" id="chart-{escape(chart.key)}">'
        f"<figcaption><span>{escape(chart.title)}</span><small>{escape(chart.help)}</small></figcaption>"
        '<button type="button" class="csv" title="the chart’s values as a CSV file">CSV</button>'
        f'<div class="plot" tabindex="0" role="group" aria-label="{escape(chart.title)}"></div></figure>'
    )


def _scales(scales: Scales, summaries: Sequence[dict[str, Any]], swatches: list[str]) -> str:
    if not scales.whats:
        return ""
    whats = "".join(f'<option value="{escape(what)}">{escape(describe(what).title)}</option>' for what in scales.whats)
    layers = '<option value="">worst layer</option>'
    layers += "".join(f"<option>{escape(layer)}</option>" for layer in scales.layers)
    chart = Chart("scales", "", "", lambda run: [])
    zero = [describe(what).title for what in scales.silent]
    return (
        (f'<p class="soft">0 at every measured step of every run: {escape(", ".join(zero))}.</p>' if zero else "")
        + f'<div class="pick"><label>Statistic <select id="what" autocomplete="off">{whats}</select></label>'
        f'<label>Layer <select id="layer" autocomplete="off">{layers}</select></label></div>'
        f"{_figure('scales', chart)}{layers_table(scales, summaries, swatches)}"
    )


def _versions(summaries: Sequence[dict[str, Any]]) -> str:
    """All versions, if every run has the same; otherwise the table has a column for them."""
    return f"Versions: {versions_text(summaries[0], all_of_them=True)}." if one_environment(summaries) else ""


def _data(runs: Sequence[Run], styles: Sequence[Style], drawn: Sequence[Drawn], scales: Scales) -> str:
    """The data for the page's script, as JSON that cannot close its script element."""
    charts: dict[str, Any] = {
        str(i): {**_axis(d.chart), "series": [_points(points) for points in d.series]} for i, d in enumerate(drawn)
    }
    charts["scales"] = {**_axis(Chart("scales", "", "", lambda run: [])), "series": []}
    data = {
        "runs": [_run(run, style) for run, style in zip(runs, styles, strict=True)],
        "charts": charts,
        "scales": _scale_data(scales, len(runs)),
    }
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _run(run: Run, style: Style) -> dict[str, Any]:
    return {
        "name": run.label,
        "colour": style.colour,
        "dash": " ".join(map(str, DASHES[style.dash])) or "none",
        "extent": [min(run.steps), max(run.steps)],
        "sums": {"tokens": _points(run.tokens), "time": _points(run.time)},
    }


def _axis(chart: Chart) -> dict[str, Any]:
    limits = [{"value": limit.value, "name": limit.name} for limit in chart.limits]
    axis = {"log": chart.log, "low": chart.low, "high": chart.high, "style": chart.style, "limits": limits}
    return {"title": chart.title, **axis}


def _points(points: Points, limit: int = LIMIT) -> list[list[Any]] | None:
    kept = thin(points, limit)
    return [[step for step, _ in kept], [short(value) for _, value in kept]] if kept else None


def _scale_data(scales: Scales, runs: int) -> dict[str, dict[str, Any]]:
    """``what`` -> how to show it, and ``layers``: layer -> series of every run; the layer "" is the worst of each step."""
    limit = max(8, min(LIMIT, _SCALE_POINTS // max(1, len(scales.series))))
    found: dict[str, dict[str, Any]] = {}
    for what in scales.whats:
        known = describe(what)
        worst = "worst means lowest here" if less_is_worse(what) else "worst means highest here"
        text = "; ".join(filter(None, (known.help, worst * scales.per_layer(what))))
        chart = Chart("", known.title, "", lambda run: [], style=known.style, limits=known.limits)
        layers: dict[str, list[Any]] = {"": [_points(scales.worst_layer(run, what)) for run in range(runs)]}
        found[what] = {**_axis(chart), "help": text, "layers": layers}
    for (run, what, layer), points in scales.series.items():
        if layer == ALL_LAYERS:  # the same as ""
            continue
        found[what]["layers"].setdefault(layer, [None] * runs)[run] = _points(points, limit)
    return found
