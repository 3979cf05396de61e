"""The results of the kernels, in Triton's interpreter.

One process runs all files, because ``TRITON_INTERPRET=1`` must be set before triton is imported, and imports are expensive.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.e2e
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_in_the_interpreter(which: str) -> None:
    environ = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    files = [str(path.relative_to(ROOT)) for path in sorted(Path(__file__).parent.glob("interpreted_*.py"))]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", which, *files]
    run = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert run.returncode == 0 and " passed" in run.stdout, run.stdout[-8000:] + run.stderr[-2000:]
