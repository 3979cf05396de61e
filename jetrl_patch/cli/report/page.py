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
from jetrl_patch.cli.report.charts import LIMIT, Chart, Scales, Style
from jetrl_patch.cli.report.runs import Points, Run, spelled, summarize
from jetrl_patch.cli.report.tables import Cell

#: budget of points for all per-layer lines together, shared equally among them
_SCALE_POINTS = 60_000


def write(
    runs: Sequence[Run], folder: Path, title: str, subtitle: str = "", notes: Sequence[str] = (), live: int = 0
) -> list[dict[str, Any]]:
    """Write ``summary.json`` and ``report.html`` into ``folder``, creating it if needed.

    Each file is replaced as a whole, so that a browser never reads half a page.

    Args:
        notes: warnings for the reader, such as skipped lines.
        live: seconds between reloads of the page; 0 for a finished page.

    Returns:
        The contents of ``summary.json``: one dict per run, as ``summarize`` makes it.
    """
    summaries = [summarize(run) for run in runs]
    styles, scales = charts.choose(runs), Scales(runs)
    drawn = [*charts.draw(runs), *map(scales.chart, scales.headline)]
    swatches = [
        '<svg class="swatch" viewBox="0 0 34 10" aria-hidden="true"><line x1="2" x2="32" y1="5" y2="5" stroke-width="3" '
        f'stroke-dasharray="{style.stroke}" style="stroke:var(--run{style.color})"/></svg>'
        for style in styles
    ]
    words = [" ".join(f"<span>{escape(word)}</span>" for word in run.label.split()) for run in runs]
    names: list[Cell] = [(swatches[i] + words[i], run.label, "left name") for i, run in enumerate(runs)]
    toggles = (
        f'<label><input type="checkbox" value="{i}" checked>{swatches[i]}<span>{escape(run.label)}</span></label>'
        for i, run in enumerate(runs)
    )
    bys = {"step": "steps"} | ({"tokens": "sampled tokens"} if any(run.tokens for run in runs) else {})
    bys |= {"time": "time"} if any(run.time for run in runs) else {}
    light, dark = (" ".join(f"--run{i}: {c};" for i, c in enumerate(colors)) for colors in (charts.LIGHT, charts.DARK))
    here = Path(__file__).parent
    html, css, script, controls = (
        (here / name).read_text(encoding="utf-8") for name in ("page.html", "page.css", "page.js", "controls.js")
    )
    page = Template(html).substitute(
        title=escape(title),
        subtitle=escape(subtitle),
        style=f":root {{ {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n{css}",
        live=_LIVE.format(seconds=live) if live else "",
        notes=f'<div class="note" role="note"><ul>{_all("<li>{}</li>", notes)}</ul></div>' if notes else "",
        cards=tables.cards_html(summaries),
        toggles="".join(toggles),
        bys="".join(f'<option value="{name}">{text}</option>' for name, text in bys.items()),
        summary=tables.summary_html(summaries, names),
        charts="".join(_section(group, drawn, scales, summaries, names) for group in charts.GROUPS),
        answers=tables.answers_html(next((run.final for run in reversed(runs) if run.final.get("answers")), {})),
        legend="".join(f"<dt>{escape(c.title)}</dt><dd>{escape(c.help)}</dd>" for c in tables.shown_columns(summaries) if c.help),
        data=_data(runs, styles, drawn, scales),
        script=f"{script}\n{controls}",
    )
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (("summary.json", json.dumps(summaries, indent=2) + "\n"), ("report.html", page)):
        fresh = folder / f".{name}.new"
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(folder / name)
    return summaries


_LIVE = (
    '<p class="note live" id="live" data-seconds="{seconds}">Live: reloads every {seconds} s. '
    '<button type="button">Pause</button></p>'
)


def _all(template: str, texts: Sequence[str]) -> str:
    return "".join(template.format(escape(text)) for text in texts)


def _section(
    group: str, drawn: Sequence[Chart], scales: Scales, summaries: Sequence[dict[str, Any]], names: Sequence[Cell]
) -> str:
    """The charts of a group. That of the mismatch and the last one, which is collapsed, only list what never changes."""
    here = [chart for chart in drawn if chart.group == group]
    still = [chart for chart in here if group in (charts.MISMATCH, charts.OTHER) and chart.steady is not None]
    figures = [_figure(chart.key, chart.title, chart.help) for chart in here if chart not in still]
    html = f'<div class="grid">{"".join(figures)}</div>' if figures else ""
    if group == charts.FP8 and scales.series:
        html += _chosen(scales) + tables.layers_html(scales, names)
    if group == charts.TIME:
        html += tables.parts_html(summaries, names)
    if still:
        rows = (f'<dt>{escape(c.title)}</dt><dd title="{escape(c.help)}">{_steady(c)}</dd>' for c in still)
        html += f"<h3>The same at every step of every run</h3><dl>{''.join(rows)}</dl>"
    if group == charts.OTHER and html:
        html = f"<details><summary>Show {len(figures)} charts</summary>{html}</details>"
    return f"<h2>{escape(group)}</h2>{html}" if html else ""


def _steady(chart: Chart) -> str:
    """The value of a chart that never changes."""
    value = chart.steady
    assert value is not None
    return f"{100 * value:.10g}%" if chart.style == "share" else f"{value:,.10g}"


def _figure(key: str, title: str, help: str) -> str:
    return (
        f'<figure data-chart="{escape(key)}" id="chart-{escape(key)}">'
        f"<figcaption><span>{escape(title)}</span><small>{escape(help)}</small></figcaption>"
        '<button type="button" class="csv" title="the chart’s values as a CSV file">CSV</button>'
        f'<div class="plot" tabindex="0" role="group" aria-label="{escape(title)}"></div></figure>'
    )


def _chosen(scales: Scales) -> str:
    """A chart for a statistic and a layer of the reader's choice."""
    whats = "".join(f'<option value="{escape(what)}">{escape(charts.describe(what).title)}</option>' for what in scales.series)
    zero = escape(", ".join(charts.describe(what).title for what in scales.silent))
    return (
        (f'<p class="soft">0 at every measured step of every run: {zero}.</p>' if zero else "")
        + f'<div class="pick"><label>Statistic <select id="what" autocomplete="off">{whats}</select></label><label>Layer '
        '<select id="layer" autocomplete="off"><option value="">worst layer</option>'
        + f'{_all("<option>{}</option>", scales.layers)}</select></label></div>{_figure("scales", "", "")}'
    )


def _data(runs: Sequence[Run], styles: Sequence[Style], drawn: Sequence[Chart], scales: Scales) -> str:
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
            {"name": run.label, "color": style.color, "dash": style.stroke, "extent": [min(run.steps), max(run.steps)],
             "sums": {"tokens": _points(run.tokens), "time": _points(run.time)}}
            for run, style in zip(runs, styles, strict=True)
        ],
        "charts": {chart.key: {**_axis(chart), "series": [*map(_points, chart.series)]} for chart in drawn},
        "scales": layers,
    }  # fmt: skip
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _axis(chart: Chart) -> dict[str, Any]:
    return {name: getattr(chart, name) for name in ("title", "log", "low", "high", "style", "limits")}


def _points(points: Points, limit: int = LIMIT) -> list[list[Any]] | None:
    kept = charts.thin(points, limit)
    return [[step for step, _ in kept], [short(value) for _, value in kept]] if kept else None


def short(value: float) -> float | str:
    """Round a value to the digits that a chart can show, never to 0 or 1; non-finite values become words, for JSON."""
    if not math.isfinite(value):
        return spelled(value)
    rounded = float(f"{value:.5g}")
    if not math.isfinite(rounded) or (rounded in (0.0, 1.0) and rounded != value):
        return value
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded
