"""The files of ``tests/gpu`` without a GPU: all can be collected, and those that say so run in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytest.importorskip("triton")


def pytest_in(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def test_in_the_interpreter():
    run = pytest_in({"TRITON_INTERPRET": "1"}, "tests/gpu/test_kernels.py")
    assert run.returncode == 0 and " passed" in run.stdout, run.stdout[-8000:] + run.stderr[-2000:]
    skipped = [line for line in run.stdout.splitlines() if line.startswith("SKIPPED")]
    assert all("too large for the interpreter" in line for line in skipped), skipped


def test_without_a_gpu_every_test_is_skipped():
    run = pytest_in({"TRITON_INTERPRET": "0"}, "tests/gpu")
    assert run.returncode == 0 and " skipped" in run.stdout and " passed" not in run.stdout, run.stdout[-4000:]
