"""The progress of commands that take long, on stderr: a live line on a terminal, plain lines in a log.

A command creates a ``Display`` and passes it, as ``Progress``, to the code that does the work. This names each stage as it begins
and, if it can count, says how much is done. stdout has only results.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    import rich.progress

#: seconds from a log's last line (or the start) to the line of a new stage: a quick command prints none
SOON = 0.5
#: seconds from a log's last line to the next one of the same stage
STILL = 10.0


class Progress:
    """What reports progress. This class itself shows nothing."""

    def stage(self, name: str, total: int = 0, unit: str = "") -> None:
        """Begin a stage of ``total`` units; 0 if it cannot be counted."""

    def done(self, count: int) -> None:
        """Say how many units of the stage are done."""


#: for callers that do not ask for progress
SILENT = Progress()


class Display(Progress):
    """Shows progress on stderr while a ``with`` block runs. A second block continues the same clock.

    Args:
        command: its name, at the beginning of every line of a log.
        stream: where to write; stderr by default.
        live: whether a terminal gets a live line. Set it to False if other programs write to the terminal too.
        clock: the time in seconds.

    Attributes:
        part: the part of the work to which the next stages belong, such as one of several modes; "" if there is only one.
    """

    def __init__(
        self, command: str, stream: IO[str] | None = None, live: bool = True, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.part = ""
        self._command, self._stream, self._clock = command, stream or sys.stderr, clock
        self._live = live and self._stream.isatty()
        self._began = self._said = clock()
        self._name, self._unit, self._count, self._total = "", "", 0, 0
        self._new = False
        self._lock = threading.Lock()
        self._bar: rich.progress.Progress | None = None
        self._ended: threading.Event | None = None

    def __enter__(self) -> Display:
        self._bar = self._make_bar() if self._live else None
        if self._bar is not None:
            self._bar.start()
            return self
        self._ended = threading.Event()
        threading.Thread(target=self._watch, args=(self._ended,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self._ended is not None:
            self._ended.set()
        with self._lock:  # finish the current write before the command continues
            self._bar = self._ended = None
            self._name = ""

    def stage(self, name: str, total: int = 0, unit: str = "") -> None:
        with self._lock:
            self._name = f"{name} ({self.part})" if self.part else name
            self._total, self._unit, self._count, self._new = total, unit, 0, True
        self._show()

    def done(self, count: int) -> None:
        with self._lock:
            self._count = count
        self._show()

    def _show(self) -> None:
        """Update the live line, or write a line if one is due."""
        with self._lock:
            count = f"{self._count:,} of {self._total:,} {self._unit}" if self._total else ""
            if self._bar is not None:
                (task,) = self._bar.task_ids
                total = self._total or None
                self._bar.update(task, description=self._name, total=total, completed=self._count, count=count)
                return
            now = self._clock()
            if not self._name or now - self._said < (SOON if self._new else STILL):
                return
            self._said, self._new = now, False
            elapsed = timedelta(seconds=int(now - self._began))
            words = f"{self._name}: {count}" if count else self._name
            with contextlib.suppress(OSError):  # the work goes on if the log's disk is full
                print(f"jetrl {self._command}: {words}, {elapsed} elapsed", file=self._stream, flush=True)

    def _watch(self, ended: threading.Event) -> None:
        """Write the lines that become due while the work reports nothing."""
        while not ended.wait(0.1):
            self._show()

    def _make_bar(self) -> rich.progress.Progress | None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        console = Console(file=self._stream)
        if not console.is_interactive:
            return None
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[count]}", markup=False),
            TimeElapsedColumn(),
        )
        # other output goes above the live line, and stdout only if it is the terminal as well
        both = sys.stdout.isatty()
        bar = Progress(*columns, console=console, transient=True, redirect_stdout=both, get_time=self._clock)
        bar.add_task("", total=None, count="")
        bar.tasks[0].start_time = self._began
        return bar
