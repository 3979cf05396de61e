"""The Triton digest: results in the interpreter (in its own process), and the code compiled for Hopper."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from . import specs_rows
from .aot import Spec, compile_one

ROOT = Path(__file__).resolve().parents[2]


def test_in_the_interpreter():
    environ = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/kernels/interpreted_digest.py"]
    run = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert run.returncode == 0 and " passed" in run.stdout, run.stdout[-8000:] + run.stderr[-2000:]


@pytest.mark.parametrize("spec", specs_rows.DIGEST, ids=lambda spec: spec.name)
def test_compiles_for_hopper_without_spills(spec: Spec):
    made = compile_one(spec)
    assert made.spills == 0 and made.registers <= 128, made[:3]
    assert "ld.global.v4.b32" in made.ptx or "ld.global.v2.b32" in made.ptx  # neighbouring bytes at once
    assert len(re.findall(r"\b(?:atom|red)\.", made.ptx)) == 1
