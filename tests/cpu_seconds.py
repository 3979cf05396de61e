"""A pytest plugin that measures the CPU-seconds of each test file, with all its child processes, on a busy machine too.

A thread looks at the descendants of this process twice a second. One that it has seen is followed until it ends, also if its
parent ends first, as that of Ray's daemons does. What a process uses after the last look at it is lost.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

#: seconds between two looks
INTERVAL = 0.5
_TICK = 1 / os.sysconf("SC_CLK_TCK")


class Meter:
    """CPU-seconds of this process and of every descendant that it ever had."""

    def __init__(self) -> None:
        self._used: dict[tuple[int, str], float] = {}  # by process id and start time
        self._lock = threading.Lock()
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        while True:
            self.total()
            time.sleep(INTERVAL)

    def total(self) -> float:
        found = list(_processes())
        with self._lock:
            family = {os.getpid(), *(pid for pid, started, *_ in found if (pid, started) in self._used)}
            while born := {pid for pid, _, parent, _ in found if parent in family} - family:
                family |= born
            self._used.update({(pid, started): used for pid, started, _, used in found if pid in family})
            return sum(self._used.values())


def _processes() -> Iterator[tuple[int, str, int, float]]:
    """Process id, start time, parent and CPU-seconds of every process."""
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            head, _, tail = entry.read_text().rpartition(")")
        except OSError:  # it has ended
            continue
        fields = tail.split()
        yield int(head.partition(" ")[0]), fields[19], int(fields[1]), (int(fields[11]) + int(fields[12])) * _TICK


class CpuSeconds:
    """Adds up what each file costs, in every worker of pytest-xdist, and writes it to a file.

    Args:
        out: a JSON file: path of each test file -> CPU-seconds.
    """

    def __init__(self, out: Path) -> None:
        self._out, self._used, self._meter = out, Counter[str](), Meter()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection(self) -> Iterator[None]:
        yield from self._measured("collection")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        return (yield from self._measured(item.nodeid.partition("::")[0]))

    def _measured(self, name: str) -> Any:
        begin = self._meter.total()
        try:
            return (yield)
        finally:
            self._used[name] += self._meter.total() - begin

    def pytest_testnodedown(self, node: Any) -> None:
        self._used.update(getattr(node, "workeroutput", {}).get("cpu_seconds", {}))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["cpu_seconds"] = dict(self._used)

    def pytest_unconfigure(self, config: pytest.Config) -> None:
        if not hasattr(config, "workeroutput"):
            self._out.parent.mkdir(exist_ok=True)
            self._out.write_text(json.dumps({name: round(used, 1) for name, used in self._used.most_common()}, indent=0))
