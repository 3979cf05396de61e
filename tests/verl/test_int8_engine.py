"""verl's FSDP engines under torchrun in INT8: all ranks agree on the smoothing, and only the policy is scaled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models import save


@pytest.mark.e2e
@pytest.mark.parametrize(("strategy", "ranks"), [("fsdp2", 2), pytest.param("fsdp", 2, marks=pytest.mark.slow)])
def test_ranks_that_saw_other_samples_send_the_same_bytes(strategy, ranks, tmp_path):
    model_dir = save(tmp_path / "qwen3", "qwen3", steps=2)
    script = Path(__file__).with_name("int8_engine_script.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(script), strategy, model_dir], env=environ, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("FACTS "))
    assert json.loads(line.removeprefix("FACTS ")) == {"groups": 6, "tensors": 36 + 21}
