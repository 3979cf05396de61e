"""Several updates between two syncs: verl restores old weights for a pass, and every update is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.forks import facts
from tests.models import save

SCRIPT = Path(__file__).with_name("old_weights_script.py")


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("ranks", "which", "runs"),
    [(1, "two", 2), pytest.param(1, "all", 4, marks=pytest.mark.slow), pytest.param(2, "gather", 2, marks=pytest.mark.slow)],
)
def test_no_update_is_lost_wherever_the_parameters_lie(tmp_path, ranks, which, runs):
    """verl's engines and its worker's own methods, without Ray: weights of two cycles with and without save and restore."""
    model = save(tmp_path / "qwen3", "qwen3", steps=2)
    found = facts(SCRIPT, ranks, model, which)
    assert len(found["runs"]) == runs
    for run in found["runs"]:
        assert run["equal"] == run["tensors"] > 30, run
        assert run["first"] and run["kept"] and run["moved"], run
    said = found["without copies"]
    assert "required the bytes that were saved, found others; updates would be lost. Keep parameters on the GPU" in said
