"""Turn the metrics of runs into a table, pictures, ``summary.json`` and an HTML page."""

from __future__ import annotations

from jetrl_patch.cli.report.command import write_report
from jetrl_patch.cli.report.page import write_page, write_summary
from jetrl_patch.cli.report.runs import ReportError, Run, summarize
from jetrl_patch.cli.report.sources import collect, read_runs
from jetrl_patch.cli.report.tables import changes_text, make_answers, make_table

__all__ = [
    "ReportError", "Run", "changes_text", "collect", "make_answers", "make_table", "read_runs", "summarize",
    "write_page", "write_report", "write_summary",
]  # fmt: skip
