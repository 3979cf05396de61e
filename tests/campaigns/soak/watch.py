"""The resources that a run holds, sampled from outside while it runs."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

#: seconds between two samples
PERIOD = 2.0


@dataclass(frozen=True)
class Sample:
    """Sums over the processes of one role; shared memory is the machine's.

    Attributes:
        step: the last completed step.
        seconds: since the start of the run.
        memory: private bytes (``RssAnon``).
        shared: bytes in /dev/shm.
        cpu: seconds of processor time since the processes started.
    """

    step: int
    seconds: float
    role: str
    processes: int
    memory: int
    files: int
    threads: int
    shared: int
    cpu: float


class Watch(threading.Thread):
    """Samples the processes whose environment has ``TESTED_RUN=mark`` while its context is open."""

    def __init__(self, run: Any, mark: str, pattern: str) -> None:
        super().__init__(daemon=True)
        self.run_watched, self.mark, self.pattern = run, mark, re.compile(pattern.encode())
        self.samples: list[Sample] = []
        #: seconds since the start at which each step was first seen to be complete
        self.arrivals: dict[int, float] = {}
        self._ended, self._begun, self._read, self._step = threading.Event(), time.monotonic(), 0, 0
        self._environs: dict[tuple[int, float], bool] = {}

    def run(self) -> None:
        last = 0.0
        while not self._ended.wait(0.1):
            now = time.monotonic() - self._begun
            self._read_steps(now)
            if now - last >= PERIOD:
                last = now
                self.samples += self._sample(now)

    def __enter__(self) -> Watch:
        self.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._ended.set()
        self.join()

    def as_json(self) -> dict[str, Any]:
        arrivals = {str(step): seconds for step, seconds in self.arrivals.items()}  # as JSON has them
        return {"samples": [asdict(sample) for sample in self.samples], "arrivals": arrivals}

    def _read_steps(self, now: float) -> None:
        with open(self.run_watched.log, "rb") as log:
            log.seek(self._read)
            text = log.read()
        text = text[: text.rfind(b"\n") + 1]
        self._read += len(text)
        for found in self.pattern.findall(text):
            self._step = max(self._step, int(found))
            self.arrivals.setdefault(int(found), now)

    def _sample(self, now: float) -> list[Sample]:
        roles: dict[str, list[tuple[int, int, int, float]]] = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if self._is_of_the_run(process):
                    times = process.cpu_times()
                    found = (_anonymous(process.pid), process.num_fds(), process.num_threads(), times.user + times.system)
                    roles.setdefault(role(" ".join(process.cmdline())), []).append(found)
        shared = sum(entry.stat().st_blocks * 512 for entry in os.scandir("/dev/shm") if entry.is_file())
        return [
            Sample(self._step, round(now, 2), name, len(found), *(sum(column) for column in columns[:3]), shared, sum(columns[3]))
            for name, found in roles.items()
            if (columns := list(zip(*found, strict=True)))
        ]

    def _is_of_the_run(self, process: psutil.Process) -> bool:
        key = (process.pid, process.create_time())
        if key not in self._environs:
            self._environs[key] = process.environ().get("TESTED_RUN") == self.mark
        return self._environs[key]


def role(command: str) -> str:
    """Return what a process is called in the figures: the actor's class in Ray, else the program."""
    if found := re.match(r"ray::(\w+)", command):
        return "Ray's idle workers" if found[1] == "IDLE" else found[1]
    if "VLLM" in command:
        return "vLLM"
    words = command.split() or ["?"]
    name = Path(words[0]).name
    return "driver" if name.startswith("python") and "ray" not in " ".join(words[1:3]) else name


def _anonymous(pid: int) -> int:
    found = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) * 1024 if found else 0
