"""The training from scratch: every format sees the same data, and FP8 is really on."""

from __future__ import annotations

import pytest

from benchmarks import scratch


def test_a_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "HELD_OUT", 1)
    monkeypatch.setattr(scratch, "LAST", 2)
    monkeypatch.setattr(scratch, "SEEDS", (0,))
    real = scratch.losses
    monkeypatch.setattr(scratch, "losses", lambda scale_format, seed: real(scale_format, seed, 8))
    rows = scratch.rows()
    trained = [float(row["training loss"]) for row in rows]
    assert [row["linear layers"] for row in rows] == list(scratch.FORMATS) and len(set(trained)) == len(rows)
    assert rows[0]["training loss, relative"] == "+0.00%"
    assert all(abs(loss / trained[0] - 1) < 0.05 for loss in trained)
