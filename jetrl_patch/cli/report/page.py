"""The report as one self-contained HTML file: style, data and script are inline, and nothing is fetched."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from jetrl_patch.cli.report import charts, tables
from jetrl_patch.cli.report.charts import LIMIT, Chart, Scales
from jetrl_patch.cli.report.runs import Points, Run, summarize

__all__ = ["short", "write"]

#: budget of points for all per-layer lines together, shared equally among them
_SCALE_POINTS = 60_000


def write(
    runs: Sequence[Run], folder: Path, title: str, subtitle: str = "", notes: Sequence[str] = (), live: int = 0
) -> list[dict[str, Any]]:
    """Write ``summary.json`` and ``report.html`` into ``folder``, creating it if needed.

    Each file is replaced as a whole, so that a browser never reads half a page.

    Args:
        notes: warnings for the reader, such as skipped lines.
        live: interval in seconds at which the page reloads itself; 0 for a finished page.

    Returns:
        The contents of ``summary.json``: one dict per run, as ``summarize`` makes it.
    """
    summaries = [summarize(run) for run in runs]
    page = _page(runs, summaries, title, subtitle, notes, live)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (("summary.json", json.dumps(summaries, indent=2) + "\n"), ("report.html", page)):
        fresh = folder / f".{name}.new"
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(folder / name)
    return summaries


def _page(
    runs: Sequence[Run], summaries: Sequence[dict[str, Any]], title: str, subtitle: str, notes: Sequence[str], live: int
) -> str:
    styles, scales = charts.choose(runs), Scales(runs)
    drawn = [*charts.draw(runs), *map(scales.chart, scales.headline)]
    swatches = [
        '<svg class="swatch" viewBox="0 0 34 10" aria-hidden="true"><line x1="2" x2="32" y1="5" y2="5" stroke-width="3" '
        f'stroke-dasharray="{_dashes(style.dash)}" style="stroke:var(--run{style.colour})"/></svg>'
        for style in styles
    ]
    toggles = (
        f'<label><input type="checkbox" value="{i}" checked>{swatches[i]}<span>{escape(run.label)}</span></label>'
        for i, run in enumerate(runs)
    )
    told = "".join(f"<li>{escape(note)}</li>" for note in notes)
    final = next((run.final for run in reversed(runs) if run.final.get("answers")), {})
    changed = final.get("answers_changed", {})
    counted = isinstance(changed, dict) and all(isinstance(changed.get(name), int) for name in tables.CHANGES)
    known = (("steps", "step", True), ("sampled tokens", "tokens", any(run.tokens for run in runs)),
             ("time", "time", any(run.time for run in runs)))  # fmt: skip
    light, dark = (" ".join(f"--run{i}: {c};" for i, c in enumerate(colours)) for colours in (charts.LIGHT, charts.DARK))
    html, css, script, controls = (
        (Path(__file__).parent / name).read_text(encoding="utf-8") for name in ("page.html", "page.css", "page.js", "controls.js")
    )
    return Template(html).substitute(
        title=escape(title),
        subtitle=escape(subtitle),
        style=f":root {{ {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n{css}",
        live=_LIVE.format(seconds=live) if live else "",
        notes=f'<div class="note" role="note"><ul>{told}</ul></div>' if notes else "",
        cards=tables.cards_html(summaries),
        toggles="".join(toggles),
        bys="".join(f'<option value="{name}">{text}</option>' for text, name, having in known if having),
        summary=tables.summary_html(summaries, swatches),
        charts=_sections(drawn, scales, summaries, swatches),
        answers=tables.answers_html(final.get("answers", ()), changed if counted else {}),
        legend="".join(f"<dt>{escape(c.title)}</dt><dd>{escape(c.help)}</dd>" for c in tables.shown_columns(summaries) if c.help),
        data=_data(runs, [(style.colour, _dashes(style.dash)) for style in styles], drawn, scales),
        script=f"{script}\n{controls}",
    )


_LIVE = (
    '<p class="note live" id="live" data-seconds="{seconds}">Live: reloads every {seconds} s. '
    '<button type="button">Pause</button></p>'
)


def _sections(drawn: Sequence[Chart], scales: Scales, summaries: Sequence[dict[str, Any]], swatches: list[str]) -> str:
    """The charts by group; the last group is collapsed, and what never changes in it is a list."""
    html = []
    for group in charts.GROUPS:
        here = [chart for chart in drawn if chart.group == group]
        still = [chart for chart in here if group == charts.OTHER and chart.steady is not None]
        figures = [_figure(chart.key, chart.title, chart.help) for chart in here if chart not in still]
        grid = f'<div class="grid">{"".join(figures)}</div>' if figures else ""
        if group == charts.FP8 and scales.series:
            grid += _scales(scales) + tables.layers_html(scales, summaries, swatches)
        if group == charts.TIME:
            grid += tables.parts_html(summaries, swatches)
        if still:
            told = (f'<dt>{escape(c.title)}</dt><dd title="{escape(c.help)}">{c.steady:,.10g}</dd>' for c in still)
            grid += f"<h3>The same at every step of every run</h3><dl>{''.join(told)}</dl>"
        if group == charts.OTHER and grid:
            grid = f"<details><summary>Show {len(figures)} charts</summary>{grid}</details>"
        html.append(f"<h2>{escape(group)}</h2>{grid}" if grid else "")
    return "".join(html)


def _figure(key: str, title: str, help: str) -> str:
    return (
        f'<figure data-chart="{escape(key)}" id="chart-{escape(key)}">'
        f"<figcaption><span>{escape(title)}</span><small>{escape(help)}</small></figcaption>"
        '<button type="button" class="csv" title="the chart’s values as a CSV file">CSV</button>'
        f'<div class="plot" tabindex="0" role="group" aria-label="{escape(title)}"></div></figure>'
    )


def _scales(scales: Scales) -> str:
    """A chart for a statistic and a layer of the reader's choice."""
    whats = "".join(f'<option value="{escape(what)}">{escape(charts.describe(what).title)}</option>' for what in scales.series)
    layers = "".join(f"<option>{escape(layer)}</option>" for layer in scales.layers)
    zero = escape(", ".join(charts.describe(what).title for what in scales.silent))
    return (
        (f'<p class="soft">0 at every measured step of every run: {zero}.</p>' if zero else "")
        + f'<div class="pick"><label>Statistic <select id="what" autocomplete="off">{whats}</select></label><label>Layer '
        f'<select id="layer" autocomplete="off"><option value="">worst layer</option>{layers}</select></label></div>'
        + _figure("scales", "", "")
    )


def _data(runs: Sequence[Run], looks: Sequence[tuple[int, str]], drawn: Sequence[Chart], scales: Scales) -> str:
    """The data for the page's script, as JSON that cannot close its script element."""
    lines = sum(len(layers) for layers in scales.series.values()) * len(runs)
    limit = max(8, min(LIMIT, _SCALE_POINTS // max(1, lines)))
    layers = {}
    for what, series in scales.series.items():
        worst = scales.chart(what)
        single = {layer: [_points(points, limit) for points in one] for layer, one in series.items()}
        single[charts.ALL_LAYERS] = [*map(_points, worst.series)]
        layers[what] = {**_axis(worst), "help": worst.help, "layers": single}
    data = {
        "runs": [
            {"name": run.label, "colour": colour, "dash": dash, "extent": [min(run.steps), max(run.steps)],
             "sums": {"tokens": _points(run.tokens), "time": _points(run.time)}}
            for run, (colour, dash) in zip(runs, looks, strict=True)
        ],
        "charts": {chart.key: {**_axis(chart), "series": [*map(_points, chart.series)]} for chart in drawn},
        "scales": layers,
    }  # fmt: skip
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _axis(chart: Chart) -> dict[str, Any]:
    return {name: getattr(chart, name) for name in ("title", "log", "low", "high", "style", "limits")}


def _dashes(lengths: Sequence[int]) -> str:
    return " ".join(map(str, lengths)) or "none"


def _points(points: Points, limit: int = LIMIT) -> list[list[Any]] | None:
    kept = charts.thin(points, limit)
    return [[step for step, _ in kept], [short(value) for _, value in kept]] if kept else None


def short(value: float) -> float | str:
    """Round a value to the digits that a chart can show, never to 0 or 1; non-finite values become strings, for JSON."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    rounded = float(f"{value:.5g}")
    if not math.isfinite(rounded) or (rounded in (0.0, 1.0) and rounded != value):
        return value
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded
