"""Ray nodes of our own on this machine, each started from a shell with an empty environment."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BIN = Path(sys.executable).parent
#: the environment of a fresh login shell, without a token in the home folder
CLEAN = {"PATH": f"{BIN}:/usr/bin:/bin", "HOME": "/nonexistent", "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1"}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Cluster:
    """Nodes in process groups of their own, in one temporary folder; ``stop`` removes everything."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="jr", dir="/tmp", ignore_cleanup_errors=True)
        self.address = f"127.0.0.1:{free_port()}"
        self.jobs = f"http://127.0.0.1:{free_port()}"
        self._nodes: list[subprocess.Popen[bytes]] = []
        self._log = Path(self._folder.name) / "nodes.txt"

    def start(self, name: str, *, cpus: int = 2, gpus: int = 0, jobs: bool = False, **environ: str) -> None:
        """Start a node with logical resources. The first one is the head, on request with a job server at ``self.jobs``."""
        where = ["--address", self.address]
        if not self._nodes:
            where = ["--head", "--port", self.address.rpartition(":")[2], f"--include-dashboard={jobs}"]
            where += ["--dashboard-host=127.0.0.1", "--dashboard-port", self.jobs.rpartition(":")[2]]
            where += ["--ray-client-server-port", str(free_port()), "--temp-dir", self._folder.name]
        command = [
            str(BIN / "ray"), "start", *where, "--block", "--node-name", name, "--node-ip-address", "127.0.0.1",
            f"--num-cpus={cpus}", f"--num-gpus={gpus}", "--object-store-memory=200000000", "--disable-usage-stats",
            "--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port", str(free_port()),
        ]  # fmt: skip
        with self._log.open("ab") as log:
            self._nodes.append(
                subprocess.Popen(
                    command, env={**CLEAN, **environ}, cwd="/", stdout=log, stderr=log, start_new_session=True
                )
            )
        self._wait(len(self._nodes))

    def _wait(self, count: int, timeout: float = 300) -> None:
        end = time.monotonic() + timeout
        while self._log.read_text(errors="replace").count("Ray runtime started.") < count:
            assert self._nodes[-1].poll() is None and time.monotonic() < end, self._log.read_text(errors="replace")
            time.sleep(0.2)

    def stop(self) -> None:
        for node in reversed(self._nodes):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(node.pid, signal.SIGTERM)
        for node in self._nodes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                node.wait(5)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(node.pid, signal.SIGKILL)
            node.wait()
        self._folder.cleanup()
