"""ZeRO-3 on a CPU: gathered weights have arrived before they are read."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("openrlhf")


@pytest.mark.e2e
@pytest.mark.slow
def test_no_weight_is_read_before_it_has_arrived():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, "-m", "tests.cpu.zero3_script", "patched"]
    environs = [{**os.environ, **group, "RANK": rank, "LOCAL_RANK": rank} for rank in ("0", "1")]
    output: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    ranks = [subprocess.Popen(command, env=environ, **output) for environ in environs]
    texts = [rank.communicate(timeout=300)[0] for rank in ranks]
    for text in texts:
        assert re.search(r"^rank \d: 0 of 45 read early", text, re.M), text[-3000:]
