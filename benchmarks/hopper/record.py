"""What a part found, kept in a JSON file that is written after each cell: a command that was cut short loses one cell at most."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]


@dataclass
class Found:
    """What one cell found: a table's rows.

    Attributes:
        note: why rows are missing although nothing failed.
        error: why the cell failed. Rows from before the failure are kept.
        command: the command line that ran it.
        clocks: of the GPU, while the cell ran.
    """

    title: str
    rows: Rows = field(default_factory=list)
    note: str = ""
    error: str = ""
    seconds: float = 0.0
    command: str = ""
    clocks: dict[str, float] = field(default_factory=dict)


@dataclass
class Record:
    """A part's cells.

    Attributes:
        planned: names of all cells, in order.
        running: the cell that has begun and not ended; "" if there is none.
        versions: hardware and software. missing: backends that are not there, and why.
    """

    part: str
    dry: bool = False
    planned: list[str] = field(default_factory=list)
    running: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    cells: dict[str, Found] = field(default_factory=dict)

    @property
    def left(self) -> list[str]:
        """Cells that have not run, in order."""
        return [name for name in self.planned if name not in self.cells]

    @property
    def failed(self) -> list[str]:
        """Cells that failed."""
        return [name for name, found in self.cells.items() if found.error]

    @property
    def complete(self) -> bool:
        """Whether every cell has run, failed or not."""
        return bool(self.planned) and not self.left

    @property
    def state(self) -> str:
        """In words: ``done``, or how far it is."""
        if not self.cells:
            return "not measured"
        done = "done" if not self.left else f"{len(self.cells)} of {len(self.planned)} cells"
        return f"{done}, {len(self.failed)} failed" if self.failed else done

    def rows(self) -> dict[str, Rows]:
        """The rows of each cell."""
        return {name: found.rows for name, found in self.cells.items()}

    def save(self, file: Path) -> None:
        """Write the file whole, or leave the one that is there."""
        file.parent.mkdir(parents=True, exist_ok=True)
        beside = file.with_suffix(".tmp")
        beside.write_text(json.dumps(asdict(self), indent=1) + "\n")
        os.replace(beside, file)


def load(file: Path, part: str) -> Record:
    """The record in a file, or an empty one.

    Raises:
        ValueError: the file is not a record of this part.
    """
    if not file.exists():
        return Record(part)
    try:
        data = json.loads(file.read_text())
        record = Record(**{**data, "cells": {name: Found(**found) for name, found in data["cells"].items()}})
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{file} is not a record of make hopper ({error}). Move it away, or repair it.") from None
    if record.part != part:
        raise ValueError(f"{file} is a record of part {record.part!r}, not of {part!r}. Move it away.")
    return record
