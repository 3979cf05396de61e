"""One training run as a group of processes: start it, measure its memory, and end all of it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil

#: Environment variable in every process of a run. Ray starts its own sessions, so a process group would miss some processes. A
#: run within a run has the marks of both.
MARK = "WORDS_RUN"


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder with a short path (a Unix socket's name has at most 107 characters), removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix="jetrl-run-", dir="/tmp"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Block Ctrl-C and SIGTERM in the body. Does nothing outside the main thread, the only one that receives signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Group:
    """A process and all its descendants, found by a mark in their environment."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], cwd: Path, log: Path) -> None:
        self.mark = uuid.uuid4().hex
        marks = "/".join(filter(None, (env.get(MARK), self.mark)))
        # SPT_NOENV: a process that renames itself, like vLLM's engines, would overwrite the environment that others see
        env = {**env, MARK: marks, "SPT_NOENV": "1"}
        self.peak_memory_bytes = 0
        with log.open("wb") as out:
            self.leader = subprocess.Popen(
                command, env=env, cwd=cwd, stdout=out, stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip

    def members(self) -> list[psutil.Process]:
        """The live processes of this run, including the leader."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if self.mark in process.environ().get(MARK, "").split("/") and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def weigh(self) -> int:
        """Memory in use now, in bytes; updates the peak. Counts shared pages once where the system reports them."""
        total = 0
        for process in self.members():
            with contextlib.suppress(psutil.Error, OSError):
                info = process.memory_full_info()
                total += getattr(info, "pss", info.rss)
        self.peak_memory_bytes = max(self.peak_memory_bytes, total)
        return total

    def wait(self, tick: Callable[[], None], seconds: float = 0.5) -> int:
        """Call ``tick`` until the leader ends; return its exit status."""
        last_weighed = 0.0
        while (status := self.leader.poll()) is None:
            tick()
            if not self.peak_memory_bytes or time.monotonic() - last_weighed > 4:  # before its exec nothing is found
                self.weigh()
                last_weighed = time.monotonic()
            time.sleep(seconds)
        tick()
        if not self.peak_memory_bytes:  # after a short run on a busy machine, weigh its children
            self.weigh()
        return status

    def end(self, patience: float = 10.0) -> None:
        """End every process of the run: interrupt, terminate, then kill. Idempotent; a second Ctrl-C cannot interrupt it."""
        with undisturbed():
            self._end(patience)

    def _end(self, patience: float) -> None:
        if self.leader.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.leader.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.leader.wait(patience)
        members = self.members()
        for process in members:
            with contextlib.suppress(psutil.Error):
                process.terminate()
        _, alive = psutil.wait_procs(members, timeout=3)
        for process in {*alive, *self.members()}:
            with contextlib.suppress(psutil.Error):
                process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.leader.wait(patience)
