"""Scripts in forked processes: their arguments, environment, output and status, as with a process of their own."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests import forks

SCRIPT = """
import os, sys, time
import beside
mine = int(os.environ.get("RANK", -1))
print(beside.NAME, sys.argv[1:], __name__, mine, os.environ.get("WORLD_SIZE"), os.environ["MINE"])
if sys.argv[1] == "fails":
    if mine == 1:
        raise ValueError("on purpose")
    time.sleep(600)
if sys.argv[1] == "sleeps":
    time.sleep(600)
sys.exit(3 if sys.argv[1] == "exits" else None)
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "beside.py").write_text("NAME = 'beside'\n")
    (tmp_path / "script.py").write_text(SCRIPT)
    monkeypatch.setenv("MINE", "set by a test")
    return tmp_path / "script.py"


def test_output_and_status(script: Path) -> None:
    ended = forks.run(script, "a", "b c", imports=())
    assert ended == (0, "beside ['a', 'b c'] __main__ -1 None set by a test\n", "")
    assert forks.run(script, "exits", imports=()).returncode == 3
    both = forks.run(script, "a", ranks=2, imports=())
    assert both.stdout.splitlines() == [f"beside ['a'] __main__ {rank} 2 set by a test" for rank in (0, 1)]


def test_a_rank_that_fails_ends_the_others(script: Path) -> None:
    begin, failed = time.monotonic(), forks.run(script, "fails", ranks=2, imports=())
    assert failed.returncode == 1 and "ValueError: on purpose" in failed.stderr and time.monotonic() - begin < 300


def test_one_that_does_not_end_is_killed(script: Path) -> None:
    with pytest.raises(TimeoutError, match=r"script\.py ran longer than 2 s: beside"):
        forks.run(script, "sleeps", imports=(), timeout=2)
    assert forks.run(script, "a", imports=()).returncode == 0
