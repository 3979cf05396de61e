"""What ``jetrl doctor --follow`` and the processes under it tell each other, through a folder named by ``environment.FOLLOW``."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NoReturn

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


def end(folder: str, status: int) -> NoReturn:
    """End this process, which has been examined with this exit status."""
    with Path(folder, _FOUND).open("a") as file:
        file.write(f"{status}\n")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def end_with(folder: str, what: str, problems: Iterable[Exception]) -> NoReturn:
    """Print the problems of ``what`` that this process has found itself, and end. Of several ranks only rank 0 prints."""
    if os.environ.get("RANK", "0") != "0":
        while not read_statuses(folder):  # the first rank that ends takes the others along
            time.sleep(0.1)
        os._exit(0)
    lines = [f"problem: {type(problem).__name__}: {problem}" for problem in problems]
    verdict = f"a run would NOT start: {len(lines)} problem(s)" if lines else "a run would start"
    print("\n".join([f"jetrl doctor: {what}", *lines, verdict]))
    end(folder, 1 if lines else 0)


def read_statuses(folder: str) -> set[int]:
    """The recorded exit statuses."""
    found = Path(folder, _FOUND)
    return {int(line) for line in found.read_text().split()} if found.exists() else set()
