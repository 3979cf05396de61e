"""Follow a file that another process writes."""

from __future__ import annotations

from pathlib import Path


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
