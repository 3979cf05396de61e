"""The report as one self-contained HTML file: style, data and Plotly's script are inline, and nothing is fetched."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from jetrl_patch.cli.report import charts, figures, tables
from jetrl_patch.cli.report.charts import Chart, Scales
from jetrl_patch.cli.report.runs import Run, summarize


def write_summary(runs: Sequence[Run], folder: Path) -> list[dict[str, Any]]:
    """Write ``summary.json`` into ``folder``, creating it if needed, and return its contents: see ``summarize``."""
    summaries = [summarize(run) for run in runs]
    folder.mkdir(parents=True, exist_ok=True)
    _replace(folder / "summary.json", json.dumps(summaries, indent=2) + "\n")
    return summaries


def write_page(
    runs: Sequence[Run],
    summaries: Sequence[dict[str, Any]],
    folder: Path,
    title: str,
    subtitle: str = "",
    notes: Sequence[str] = (),
    live: int = 0,
) -> Path:
    """Write ``report.html`` into ``folder``, and return its path.

    The file is replaced as a whole, so that a browser never reads half a page.

    Args:
        summaries: what ``write_summary`` returns.
        notes: warnings for the reader, such as skipped lines.
        live: seconds between reloads of the page; 0 for a finished page.

    Raises:
        ReportError: Plotly is not installed.
    """
    script = figures.script()
    scales, styles = Scales(runs), charts.choose(runs)
    drawn = [*charts.draw(runs), *map(scales.chart, scales.headline)]
    still = [chart for chart in drawn if chart.group in (charts.MISMATCH, charts.OTHER) and chart.steady is not None]
    moving = [chart for chart in drawn if chart not in still]
    colors = [style.color for style in styles]
    further = {"parts": figures.parts(runs), "layers": figures.layers(runs, scales)}
    html = Template(Path(__file__).with_suffix(".html").read_text(encoding="utf-8"))
    page = html.substitute(
        title=escape(title),
        subtitle=escape(subtitle),
        live=f'<meta http-equiv="refresh" content="{live}">' if live else "",
        notes=f'<div class="note" role="note">{"<br>".join(map(escape, notes))}</div>' if notes else "",
        cards=tables.cards_html(summaries),
        summary=tables.summary_html(summaries, colors, every=False),
        every=tables.summary_html(summaries, colors, every=True),
        still=_still(still),
        lines=figures.html(figures.lines(runs, styles, moving), "lines") if moving else "",
        **{name: figures.html(figure, name) if figure else "" for name, figure in further.items()},
        answers=tables.answers_html(next((run.final for run in reversed(runs) if run.final.get("answers")), {})),
        legend="".join(f"<dt>{escape(c.title)}</dt><dd>{escape(c.help)}</dd>" for c in tables.shown_columns(summaries) if c.help),
        script=script,
    )
    return _replace(folder / "report.html", page)


def _still(still: Sequence[Chart]) -> str:
    """What never changes between rollout and trainer, and what else never changes: a list in place of charts."""
    rows = "".join(f'<dt>{escape(c.title)}</dt><dd title="{escape(c.help)}">{c.text(c.steady or 0.0)}</dd>' for c in still)
    return f"<h3>The same at every step of every run</h3><dl>{rows}</dl>" if still else ""


def _replace(path: Path, text: str) -> Path:
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_text(text, encoding="utf-8")
    return fresh.replace(path)
