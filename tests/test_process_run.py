"""Runs of the frameworks in tests: a run that Ray gave up at its start is started again, any other failure is final."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.process_run import SLOW_RAY, STARTS, ProcessRun

SCRIPT = """
import pathlib, sys
count = pathlib.Path("count"); n = int(count.read_text()) + 1 if count.exists() else 1
count.write_text(str(n))
print("start", n, flush=True)
if n <= int(sys.argv[2]):
    print(sys.argv[1], flush=True)
    sys.exit(7)
print("well", flush=True)
"""


def run(folder: Path, says: str, failures: int) -> ProcessRun:
    return ProcessRun(folder, lambda ray_dir: ([sys.executable, "-c", SCRIPT, says, str(failures)], {}), {})


@pytest.mark.parametrize(
    ("says", "failures", "code", "starts"), [(SLOW_RAY, 2, 0, 3), (SLOW_RAY, 9, 7, STARTS), ("SyncError", 1, 7, 1)]
)
def test_only_a_late_ray_is_started_again(tmp_path, says, failures, code, starts):
    found = run(tmp_path, says, failures)
    assert found.wait(60) == code
    assert (tmp_path / "count").read_text() == str(starts)


def test_waiting_for_a_line_outlives_a_late_ray(tmp_path):
    found = run(tmp_path, SLOW_RAY, 1)
    found.wait_for(lambda text: "well" in text, 60)
    found.stop()
