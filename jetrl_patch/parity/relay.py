"""Progress of a process that measures, shown by the process that started it: calls travel as lines of a file.

A pipe would do too, but the engine's own processes would inherit it, and one that stays behind would keep it open.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from jetrl_patch.progress import Progress

__all__ = ["Sender", "relayed"]

#: seconds between two looks at the file
_EVERY = 0.2


class Sender:
    """A ``Progress`` that writes each call to a file, in the process that measures. The file buffers no more than a line."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def stage(self, name: str, total: int = 0, unit: str = "") -> None:
        self._send([name, total, unit])

    def done(self, count: int) -> None:
        self._send([count])

    def _send(self, call: list[str | int]) -> None:
        with contextlib.suppress(OSError):
            self._file.write(json.dumps(call) + "\n")


@contextlib.contextmanager
def relayed(file: Path, progress: Progress) -> Iterator[None]:
    """While the block runs, repeat on ``progress`` every call that a ``Sender`` writes to the file."""
    ended = threading.Event()
    thread = threading.Thread(target=_follow, args=(file, progress, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _follow(file: Path, progress: Progress, ended: threading.Event) -> None:
    at, last = 0, False
    while not last:
        last = ended.wait(_EVERY)  # what was written until the end is read too
        content = file.read_bytes()[at:] if file.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        at += len(whole)
        for line in whole.splitlines():
            match json.loads(line):
                case [str(name), int(total), str(unit)]:
                    progress.stage(name, total, unit)
                case [int(count)]:
                    progress.done(count)
