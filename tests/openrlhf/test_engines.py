"""A policy actor waits for vLLM's engines only while they can still come."""

from __future__ import annotations

import subprocess
import sys
import tempfile

import pytest

from tests.openrlhf.run_openrlhf import Run, make_task

#: real Ray actors in the place of engines: one that takes a while, one that cannot be built
SCRIPT = """
import sys, time, ray
from jetrl_patch import JetrlError
from jetrl_patch.adapters.openrlhf.startup import require_running

class Engine:
    def __init__(self, fault):
        time.sleep(1)
        if fault:
            raise ValueError(fault + "\\n  and its folder")
    def get_num_unfinished_requests(self):
        return 0

ray.init(num_cpus=3, include_dashboard=False, _temp_dir=sys.argv[1])
make = ray.remote(Engine).remote
require_running([make(""), make("")])
print("RUNNING")
try:
    require_running([make(""), make("no model in /here")])
except JetrlError as error:
    print(error)
"""


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_an_engine_that_cannot_be_built_is_named_with_its_cause():
    with tempfile.TemporaryDirectory(prefix="jr", dir="/tmp", ignore_cleanup_errors=True) as folder:
        found = subprocess.run([sys.executable, "-c", SCRIPT, folder], capture_output=True, text=True, timeout=280)
    assert found.returncode == 0, found.stderr[-3000:]
    said = found.stdout.splitlines()  # between which Ray may write what it saw
    assert "RUNNING" in said
    error = said[-1]
    assert error == (
        "vLLM engine 1: required a running engine, found ValueError: no model in /here and its folder. Fix the cause, "
        "which the engine's output shows in full, and start again."
    )


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("precision", ["bf16", "fp8-unified"])
def test_a_run_whose_engine_cannot_be_built_ends(tmp_path, precision):
    """Without the check, the policy actor would wait for the engine forever, as in bf16 it does by default."""
    environ = {"JETRL_PRECISION": precision, "JETRL_UPSTREAM_FIXES": "true", "CUDA_VISIBLE_DEVICES": ""}
    run = Run(make_task(tmp_path), "--data.max_len", "100000", environ=environ, steps=1)
    assert run.wait(900) != 0
    assert "vLLM engine 0: required a running engine, found" in run.text and "max_model_len" in run.text
