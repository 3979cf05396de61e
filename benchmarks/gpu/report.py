"""Tables for the screen and for Markdown pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

Rows = Sequence[dict[str, Any]]


def shown(value: object) -> str:
    """Format a number with three significant digits; a dash if it could not be measured."""
    if isinstance(value, float):
        return "–" if value != value else f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return str(value).replace("|", "/")


def show(console: Console, title: str, rows: Rows) -> None:
    """Print one table."""
    table = Table(title=title)
    for name in rows[0]:
        table.add_column(name, justify="left" if isinstance(rows[0][name], str) else "right")
    for row in rows:
        table.add_row(*(shown(value) for value in row.values()))
    console.print(table)


def markdown(title: str, rows: Rows, note: str = "") -> str:
    """One table of a page, or the reason why it is missing. Rows may lack columns."""
    lines = [f"## {title}", "", *([note.replace("|", "/"), ""] if note else [])]
    if not rows:
        return "\n".join(lines)
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines += ["| " + " | ".join(names) + " |", "|" + " --- |" * len(names)]
    lines += ["| " + " | ".join(shown(row.get(name, "")) for name in names) + " |" for row in rows]
    return "\n".join(lines) + "\n"
