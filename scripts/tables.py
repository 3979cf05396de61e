"""Tables and texts for pages: Markdown, the marks that they are written between, and the processor's name."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def shown(value: object) -> str:
    """Format a number with three significant digits; a dash if it could not be measured."""
    if isinstance(value, float):
        return "–" if value != value else f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return str(value).replace("|", "/")


def markdown(rows: Sequence[Row], title: str = "", note: str = "") -> str:
    """A Markdown table with an optional title and note. Rows may lack columns."""
    lines = [line for text in (f"## {title}" if title else "", note.replace("|", "/")) if text for line in (text, "")]
    if rows:
        names = list(dict.fromkeys(name for row in rows for name in row))
        lines += ["| " + " | ".join(names) + " |", "|" + " --- |" * len(names)]
        lines += ["| " + " | ".join(shown(row.get(name, "")) for name in names) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def filled(page: str, texts: Mapping[str, str]) -> str:
    """The page with each text between its marks, ``<!-- name -->`` and ``<!-- /name -->``: as a block, or within a sentence.

    Raises:
        ValueError: the page lacks a mark.
    """
    for name, text in texts.items():
        first, last = f"<!-- {name} -->", f"<!-- /{name} -->"
        if not 0 <= page.find(first) < page.find(last):
            raise ValueError(f"the page needs the marks {first} and {last}, in this order, and lacks one. Add it.")
        before, _, rest = page.partition(first)
        line = "\n" if "\n" in text else ""
        page = f"{before}{first}{line}{text.strip()}{line}{last}{rest.partition(last)[2]}"
    return page


def processor() -> str:
    """The processor's name, as reported by the system."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
