"""What a part found, in a JSON file that is written after each piece: a command that was cut short loses one piece at most."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]
#: how often a piece may end its process before it counts as failed
TRIALS = 2


@dataclass
class Found:
    """What one cell found: a table's rows.

    Attributes:
        done: names of the pieces that were measured.
        errors: piece -> why it failed; "" stands for the cell itself.
        lost: piece -> how it ended its process, each time.
        complete: whether no piece is left.
        command: the command line that ran it last.
        environment: hardware, software and options of all its rows.
        clocks: of the GPU, while the cell ran last.
    """

    title: str
    rows: Rows = field(default_factory=list)
    done: list[str] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)
    lost: dict[str, list[str]] = field(default_factory=dict)
    complete: bool = False
    seconds: float = 0.0
    command: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    clocks: dict[str, float] = field(default_factory=dict)

    def lose(self, piece: str, how: str) -> None:
        """Note that a piece ended its process. It runs once more in another one; then it has failed."""
        self.lost.setdefault(piece, []).append(how)
        if len(self.lost[piece]) >= TRIALS:
            self.errors[piece] = f"ended its process {TRIALS} times: {how}"


@dataclass
class Record:
    """A part's cells.

    Attributes:
        planned: names of all cells, in order.
        running: the cell and the piece that have begun and not ended; empty if there are none.
        missing: backends and libraries that are not there, and why.
    """

    part: str
    dry: bool = False
    planned: list[str] = field(default_factory=list)
    running: list[str] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    cells: dict[str, Found] = field(default_factory=dict)

    @property
    def left(self) -> list[str]:
        """Cells that have not begun, then those that have not ended, in order."""
        begun = [name for name in self.planned if name in self.cells and not self.cells[name].complete]
        return [name for name in self.planned if name not in self.cells] + begun

    @property
    def failed(self) -> list[str]:
        """Cells of which a piece failed."""
        return [name for name, found in self.cells.items() if found.errors]

    @property
    def complete(self) -> bool:
        """Whether every cell has ended, failed or not."""
        return bool(self.planned) and not self.left

    @property
    def state(self) -> str:
        """In words: ``done``, or how far it is."""
        if not self.cells:
            return "not measured"
        ended = sum(found.complete for found in self.cells.values())
        done = "done" if not self.left else f"{ended} of {len(self.planned)} cells"
        return f"{done}, {len(self.failed)} failed" if self.failed else done

    def rows(self) -> dict[str, Rows]:
        """The rows of each cell."""
        return {name: found.rows for name, found in self.cells.items()}

    def environments(self) -> list[dict[str, str]]:
        """The different environments of its cells; one, unless the file was put together by hand."""
        found: list[dict[str, str]] = []
        for cell in self.cells.values():
            if cell.environment not in found:
                found.append(cell.environment)
        return found

    def forget_failures(self) -> None:
        """Let failed pieces run again. What was measured is kept."""
        for name in self.failed:
            found = self.cells[name]
            found.errors, found.lost, found.complete = {}, {}, False

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
