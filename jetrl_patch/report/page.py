"""The report as one self-contained HTML file: styles, data and script are inline, and nothing is fetched."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from jetrl_patch.report.charts import GROUPS, Chart, Drawn, draw
from jetrl_patch.report.runs import Points, Run
from jetrl_patch.report.scales import ALL_LAYERS, Scales, draw_scales, read_scales
from jetrl_patch.report.series import LIMIT, short, thin
from jetrl_patch.report.styles import DARK, DASHES, LIGHT, Style, choose
from jetrl_patch.report.tables import shown_columns, versions_text
from jetrl_patch.report.tables_html import (
    answers_table,
    cards,
    layers_table,
    one_environment,
    parts_table,
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
) -> str:
    """The HTML of the page.

    Args:
        summaries: one summary per run, in the order of the runs.
        notes: warnings for the reader, such as skipped lines.
        answers: the model's answers before and after training; if empty, the page has no such section.
    """
    styles, scales = choose(runs), read_scales(runs)
    drawn = [*draw(runs), *draw_scales(scales, len(runs))]
    swatches = [swatch(style) for style in styles]
    template = Template((_FOLDER / "page.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=escape(title),
        subtitle=escape(subtitle),
        style=_style(),
        notes=_notes(notes),
        cards=cards(summaries),
        toggles="".join(_toggle(i, run, swatches[i]) for i, run in enumerate(runs)),
        summary=summary_table(summaries, swatches),
        charts=_sections(drawn, scales, summaries, swatches),
        answers=answers_table(answers),
        legend="".join(
            f"<dt>{escape(c.title)}</dt><dd>{escape(c.help)}</dd>" for c in shown_columns(summaries) if c.help
        ),
        versions=escape(_versions(summaries)),
        data=_data(runs, styles, drawn, scales),
        drawing=(_FOLDER / "chart.html").read_text(encoding="utf-8"),
        behaviour=(_FOLDER / "behaviour.html").read_text(encoding="utf-8"),
    )


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
    """The charts by group; the last group is collapsed."""
    parts = []
    for group in GROUPS:
        figures = "".join(_figure(i, d.chart) for i, d in enumerate(drawn) if d.chart.group == group)
        grid = f'<div class="grid">{figures}</div>' if figures else ""
        if group == "FP8 statistics":
            grid += _scales(scales, summaries, swatches)
        if group == GROUPS[-1]:
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
        f'<div class="plot" tabindex="0" role="group" aria-label="{escape(chart.title)}"></div></figure>'
    )


def _scales(scales: Scales, summaries: Sequence[dict[str, Any]], swatches: list[str]) -> str:
    if not scales.whats:
        return ""
    whats = "".join(f"<option>{escape(what)}</option>" for what in scales.whats)
    layers = '<option value="">worst layer</option>'
    layers += "".join(f"<option>{escape(layer)}</option>" for layer in scales.layers)
    chart = Chart(
        "scales", "", "", lambda run: [], help="worst means lowest for a signal-to-noise ratio, otherwise highest"
    )
    return (
        f'<div class="pick"><label>Statistic <select id="what" autocomplete="off">{whats}</select></label>'
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
    charts["scales"] = {"title": "", "log": False, "low": None, "high": None, "style": "number", "series": []}
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
    }


def _axis(chart: Chart) -> dict[str, Any]:
    return {"title": chart.title, "log": chart.log, "low": chart.low, "high": chart.high, "style": chart.style}


def _points(points: Points, limit: int = LIMIT) -> list[list[Any]] | None:
    kept = thin(points, limit)
    return [[step for step, _ in kept], [short(value) for _, value in kept]] if kept else None


def _scale_data(scales: Scales, runs: int) -> dict[str, dict[str, list[Any]]]:
    """``what -> layer -> series of every run``; the layer "" is the worst of each step."""
    limit = max(8, min(LIMIT, _SCALE_POINTS // max(1, len(scales.series))))
    found: dict[str, dict[str, list[Any]]] = {}
    for what in scales.whats:
        found[what] = {"": [_points(scales.worst_layer(run, what)) for run in range(runs)]}
    for (run, what, layer), points in scales.series.items():
        if layer == ALL_LAYERS:  # the same as ""
            continue
        found[what].setdefault(layer, [None] * runs)[run] = _points(points, limit)
    return found
