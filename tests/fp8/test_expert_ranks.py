"""Experts that the trainer's ranks share have the bits of a layer that holds all, whatever the rollout's split."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.forks import facts, run

SCRIPT = Path(__file__).with_name("expert_ranks_script.py")


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("split", ["one 1 pow2", "experts 2 fp32", "experts 6 pow2", "columns 2 pow2", "experts 4 pow2 plain"])
def test_outputs_and_gradients_are_those_of_one_rank(split, ranks):
    found = facts(SCRIPT, ranks, *split.split())
    for name in ("y", "gate_up", "down", "weights", "unused", "without gradients"):
        assert found[name] == [True] * ranks, name
    assert max(found["x"]) < 1e-6  # ranks add their sums in FP32


def test_ranks_that_do_not_divide_the_experts_are_refused():
    done = run(SCRIPT, *"one 1 pow2".split(), ranks=5)
    assert done.returncode
    assert "experts of a layer: required a number that 5 expert-parallel ranks divide, found 12" in done.stderr
