"""Print a report as a table in the terminal."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jetrl_patch.doctor.report import Report

__all__ = ["show"]

_STYLES = {"ok": "green", "warning": "yellow", "unknown": "magenta", "problem": "bold red", "skipped": "dim"}


def show(report: Report, console: Console | None = None) -> None:
    """Print the checks, what to do about them, and the verdict."""
    console = console or Console()
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("check", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("finding", overflow="fold")
    for check in report.checks:
        style = _STYLES[check.state]
        to_do = f"\n[bold]→[/] {escape(check.to_do)}" if check.to_do else ""
        table.add_row(check.name, f"[{style}]{check.state}[/]", escape(check.finding) + to_do)
    console.print(table)
    colour = {True: "green", False: "red", None: "magenta"}[report.starts]
    console.print(f"[bold {colour}]{report.verdict}[/]")
