"""Turn the metrics of runs into a table, pictures, ``summary.json`` and an HTML page.

Importing the package loads neither torch nor matplotlib; drawing pictures imports matplotlib.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jetrl_patch.report.page import make_page
from jetrl_patch.report.pictures import draw_learning, draw_mismatch, draw_pictures
from jetrl_patch.report.runs import ReportError, Run
from jetrl_patch.report.sources import Source, collect, name_runs, read_runs
from jetrl_patch.report.summary import SUMMARY_KEYS, summarize
from jetrl_patch.report.tables import CHANGES, make_answers, make_table

__all__ = [
    "SUMMARY_KEYS",
    "ReportError",
    "Run",
    "collect",
    "draw_learning",
    "draw_mismatch",
    "draw_pictures",
    "make_answers",
    "make_table",
    "read_runs",
    "summarize",
    "write",
    "write_report",
]


def write_report(folder: Path, title: str = "jetrl_patch", subtitle: str = "") -> list[dict[str, Any]]:
    """Report on ``folder/metrics.jsonl`` in the same folder; see ``write``.

    Raises:
        ReportError: there is nothing to report on, or matplotlib is missing (the page is written nevertheless).
    """
    notes: list[str] = []
    source = Source(folder)
    source.runs = [run for run in read_runs(folder / "metrics.jsonl", notes=notes) if run.steps]
    name_runs([source])
    summaries = write(source.runs, folder, title, subtitle, notes)
    draw_pictures(source.runs, folder)
    return summaries


def write(
    runs: Sequence[Run], folder: Path, title: str, subtitle: str = "", notes: Sequence[str] = (), live: int = 0
) -> list[dict[str, Any]]:
    """Write ``summary.json`` and ``report.html`` into ``folder``, creating it if needed.

    Each file is replaced as a whole, so that a browser never reads half a page.

    Args:
        live: interval in seconds at which the page loads itself anew; 0 for a finished page.

    Returns:
        The contents of ``summary.json``: one dict with ``SUMMARY_KEYS`` per run.
    """
    summaries = [summarize(run) for run in runs]
    final = next((run.final for run in reversed(runs) if run.final.get("answers")), {})
    changed = final.get("answers_changed", {})
    if not isinstance(changed, dict) or any(not isinstance(changed.get(name), int) for name in CHANGES):
        changed = {}
    folder.mkdir(parents=True, exist_ok=True)
    _replace(folder / "summary.json", json.dumps(summaries, indent=2) + "\n")
    page = make_page(runs, summaries, title, subtitle, notes, final.get("answers", ()), changed, live)
    _replace(folder / "report.html", page)
    return summaries


def _replace(path: Path, text: str) -> None:
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(path)
