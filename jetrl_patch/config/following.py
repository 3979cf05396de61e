"""What ``jetrl doctor --follow`` and the processes under it tell each other, through a folder named by ``environment.FOLLOW``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

#: the exit status of a doctor that was asked about something else than a training program
ANOTHER = 3
_OPTIONS, _FOUND = "options.json", "found"


def write_options(folder: str, options: Sequence[str]) -> None:
    """Keep the options of the doctor, for those that examine a process."""
    Path(folder, _OPTIONS).write_text(json.dumps([*options]))


def read_options(folder: str) -> list[str]:
    """What ``write_options`` has kept."""
    options: list[str] = json.loads(Path(folder, _OPTIONS).read_text())
    return options


def add_status(folder: str, status: int) -> None:
    """Record the exit status of a doctor that has examined a process."""
    with Path(folder, _FOUND).open("a") as file:
        file.write(f"{status}\n")


def read_statuses(folder: str) -> set[int]:
    """The recorded exit statuses."""
    found = Path(folder, _FOUND)
    return {int(line) for line in found.read_text().split()} if found.exists() else set()
