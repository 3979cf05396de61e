"""From ``metrics.jsonl`` to a table, pictures, ``summary.json`` and a page.

Importing this costs neither torch nor matplotlib; pictures import matplotlib when they are drawn.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jetrl_patch.report.page import make_page
from jetrl_patch.report.pictures import draw_learning, draw_mismatch
from jetrl_patch.report.runs import SUMMARY_KEYS, ReportError, Run, read_runs, summarize
from jetrl_patch.report.tables import make_answers, make_table

__all__ = ["SUMMARY_KEYS", "ReportError", "Run", "make_answers", "make_table", "read_runs", "summarize", "write_report"]


def write_report(folder: Path, title: str = "jetrl_patch", subtitle: str = "") -> list[dict[str, Any]]:
    """Read ``folder/metrics.jsonl``; write ``summary.json``, ``learning.png``, ``mismatch.png`` and ``report.html`` there.

    Returns:
        The summaries that ``summary.json`` holds: one dict with ``SUMMARY_KEYS`` for each arm and seed.

    Raises:
        ReportError: there is nothing to report on, or matplotlib is missing (``summary.json`` is written all the same).
    """
    runs = read_runs(folder / "metrics.jsonl")
    summaries = [summarize(run) for run in runs]
    (folder / "summary.json").write_text(json.dumps(summaries, indent=2) + "\n", encoding="utf-8")
    draw_learning(runs, folder / "learning.png")
    draw_mismatch(runs, folder / "mismatch.png")
    answers: list[dict[str, Any]] = next(
        (run.final["answers"] for run in reversed(runs) if run.final.get("answers")), []
    )
    page = make_page(summaries, title, subtitle, folder / "learning.png", folder / "mismatch.png", answers)
    (folder / "report.html").write_text(page, encoding="utf-8")
    return summaries
