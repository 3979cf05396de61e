"""Print the tables, and write them as a JSON file and a Markdown page under ``docs/benchmarks/``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.gpu.targets import missed

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
    """One table of the page, or the reason why it is missing."""
    lines = [f"## {title}", "", *([note.replace("|", "/"), ""] if note else [])]
    if not rows:
        return "\n".join(lines)
    names = list(rows[0])
    lines += ["| " + " | ".join(names) + " |", "|" + " --- |" * len(names)]
    lines += ["| " + " | ".join(shown(row[name]) for name in names) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def write(page: Path, title: str, record: dict[str, Any], parts: dict[str, tuple[str, Rows, str]]) -> None:
    """Write ``page`` (Markdown), and the same figures, unrounded, to a JSON file beside it."""
    page.parent.mkdir(parents=True, exist_ok=True)
    machine = ", ".join(f"{name} {value}" for name, value in record["versions"].items())
    missing = "; ".join(f"{name}: {reason}" for name, reason in record["missing"].items())
    head = f"# {title}\n\n{machine}. Command: `{record['command']}`. {record['seconds']:.0f} seconds in all."
    head += f" Not measured: {missing}." if missing else ""
    head += "\n\nBest of interleaved rounds, through CUDA graphs. `BF16 / this` above 1 is faster than BF16.\n\n"
    tables = {name: markdown(title, rows, note) for name, (title, rows, note) in parts.items()}
    if "targets" in parts and (reasons := missed(parts["targets"][1])):
        tables["targets"] += "\n" + reasons
    page.write_text(head + "\n".join(tables.values()))
    figures = {name: {"title": title, "note": note, "rows": list(rows)} for name, (title, rows, note) in parts.items()}
    page.with_suffix(".json").write_text(json.dumps({**record, "parts": figures}, indent=1) + "\n")
