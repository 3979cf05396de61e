"""Real runs of TRL, recorded and judged by packages of others."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.judges import JUDGES, needs_judges
from tests.trl import needs_trl, run_python, train

pytestmark = [needs_trl, needs_judges, pytest.mark.e2e]


def recorded(folder: Path, monkeypatch: pytest.MonkeyPatch, **plugin: Any) -> tuple[list[dict[str, float]], dict[str, Any]]:
    """TRL's log of a run with martingale's recorder, and the verdicts on its record."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(JUDGES), os.environ.get("PYTHONPATH")))))
    log = train(folder, {"precision": "fp8-unified", **plugin}, {"martingale": "record"})
    head = (folder / "head.txt").read_text()
    done = run_python(folder, str(Path(__file__).with_name("verdicts.py")), "record", head)
    assert done.returncode == 0, done.stderr[-4000:]
    return log, json.loads(done.stdout.splitlines()[-1])


def test_others_find_an_exact_run_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, found = recorded(tmp_path, monkeypatch)

    steps = [row for row in log if "loss" in row]
    assert len(steps) == 3
    assert all(row["martingale/floor_mean_abs_log_ratio"] == 0 == row["martingale/alarms"] for row in steps)
    assert found["errors"] == {} and found["anchored"] and found["withheld"] is None and found["lags"] == [0]
    assert found["tokens"] == found["compared"] > 100
    assert found["mean"] == found["max"] == "0/1"  # martingale computes with fractions
    assert found["mismatch/bitwise_frac"] == found["mismatch/abs_diff_mean"] == found["mismatch/k3_kl"] == 0


def test_others_see_the_mismatch_of_a_run_that_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, found = recorded(tmp_path, monkeypatch, align="linear")

    assert found["errors"] == {} and found["tokens"] == found["compared"] > 100
    assert found["mean"] != "0/1" and found["mismatch/bitwise_frac"] > 0.5
