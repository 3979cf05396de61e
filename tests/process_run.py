"""Run a framework's trainer as a user would: one process group, one log, no process left behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

#: variables of the test's own environment that a run must not inherit
FOREIGN = ("JETRL_", "VERL_", "VLLM_CPU_KV")
QUIET = {
    "OMP_NUM_THREADS": "1", "RAY_DEDUP_LOGS": "0", "RAY_memory_monitor_refresh_ms": "0", "HF_HUB_OFFLINE": "1",
}  # fmt: skip

#: Ray's message when its node is late, and how often a run is restarted because of it
SLOW_RAY, STARTS = "The current node timed out during startup", 3


class ProcessRun:
    """One run in its own process group. ``text`` is its output so far.

    Args:
        folder: where it runs and where its log goes.
        command: receives a short folder for Ray; returns the command line and additional environment variables.
        environ: the test's own variables, which win.
    """

    def __init__(
        self, folder: Path, command: Callable[[str], tuple[list[str], Mapping[str, str]]], environ: Mapping[str, str]
    ) -> None:
        self._folder, self._command, self._environ = folder, command, environ
        self._starts = 0
        self._start()

    def _start(self) -> None:
        remove_dead_locks()
        self._starts += 1
        self._ray_dir = tempfile.TemporaryDirectory(prefix="jr", dir="/tmp", ignore_cleanup_errors=True)
        self.log = self._folder / f"log-{time.monotonic_ns()}.txt"
        words, more = self._command(self._ray_dir.name)
        clean = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
        with self.log.open("w") as out:
            self.process = subprocess.Popen(
                words, env={**clean, **QUIET, **more, **self._environ}, cwd=self._folder, stdout=out,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def _started_again(self) -> bool:
        """Restart a run if Ray itself gave up. It waits 30 seconds for its node, and a busy machine takes longer."""
        if self._starts == STARTS or SLOW_RAY not in self.text:
            return False
        self.stop()
        self._start()
        return True

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def failure(self) -> str:
        """What to show when a run failed: its first two tracebacks, and the end of its output."""
        text = self.text
        starts = [found.start() for found in re.finditer(r"^.*Traceback \(most recent call last\)", text, re.MULTILINE)]
        return "\n[...]\n".join([*(text[start : start + 4000] for start in starts[:2]), text[-4000:]])

    def wait(self, timeout: float) -> int:
        end = time.monotonic() + timeout
        while True:
            try:
                code = self.process.wait(max(0.0, end - time.monotonic()))
            finally:
                self.stop()
            if code == 0 or not self._started_again():
                return code

    def wait_for(self, seen: Callable[[str], object], timeout: float) -> None:
        end = time.monotonic() + timeout
        while not seen(self.text):
            assert self.process.poll() is None or self._started_again(), self.failure
            assert time.monotonic() < end, self.failure
            time.sleep(0.5)

    def stop(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self._ray_dir.cleanup()


def remove_dead_locks() -> None:
    """Remove the locks of C++ extensions that no process holds: those of tests killed while DeepSpeed was building."""
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions")
    locks = {str(lock.resolve()): lock for lock in root.glob("**/lock")}  # before the processes: a later lock may be held
    held = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            held.add(os.readlink(link))
    for lock in (lock for path, lock in locks.items() if path not in held):
        lock.unlink(missing_ok=True)
