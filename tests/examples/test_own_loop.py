"""The example of a training loop without a framework: it runs, every token is equal, and it learns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "import json, sys; from examples.own_loop import train; print('FOUND', json.dumps(train(int(sys.argv[1]))))"


@pytest.mark.e2e
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("steps", [2, pytest.param(30, marks=pytest.mark.slow)])
def test_every_token_is_equal(steps: int) -> None:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [sys.executable, "-c", SCRIPT, str(steps)]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    found = json.loads(done.stdout.split("FOUND ")[1])
    assert len(found) == steps and done.stdout.count("bit-equal 100.0%") == steps
    for step in found:
        assert step["jetrl/bit_equal_fraction"] == 1.0 and step["jetrl/logp_abs_diff_max"] == 0.0 and step["jetrl/tokens"] > 1000
        assert step["jetrl/sync_bytes"] < 0.6 * step["jetrl/sync_bytes_bf16"]
    if steps >= 30:
        rewards = [step["reward"] for step in found]
        assert fmean(rewards[-5:]) > fmean(rewards[:5]) + 0.2, rewards


def test_the_page_shows_the_file() -> None:
    assert '--8<-- "examples/own_loop.py"' in (ROOT / "docs" / "own-loop.md").read_text()
    assert len((ROOT / "examples" / "own_loop.py").read_text().splitlines()) <= 120
