"""Follow a file that another process writes, line by line or step by step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any


class Tail:
    """The complete lines that a file gains."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._position = 0

    def lines(self) -> list[str]:
        """The lines since the last call; none before the file exists."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self._position)
            chunk = file.read()
        complete = chunk[: chunk.rfind(b"\n") + 1]
        self._position += len(complete)
        return complete.decode("utf-8", errors="replace").splitlines()


class Follower:
    """The steps that a log gains. ``parse`` returns a line's step and metrics; None for any other line."""

    def __init__(self, log: Path, parse: Callable[[str], tuple[int, dict[str, Any]] | None]) -> None:
        self.last = -1
        self._tail = Tail(log)
        self._parse = parse

    def new(self) -> list[tuple[int, dict[str, Any]]]:
        """``(step, metrics)`` of every complete line since the last call."""
        found = [logged for line in self._tail.lines() if (logged := self._parse(line)) is not None]
        self.last = max([self.last, *(step for step, _ in found)])
        return found
