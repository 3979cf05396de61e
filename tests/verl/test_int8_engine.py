"""verl's FSDP engines under torchrun in INT8: all ranks agree on the smoothing, and only the policy is scaled."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.forks import facts
from tests.models import save


@pytest.mark.e2e
@pytest.mark.parametrize(("strategy", "ranks"), [("fsdp2", 2), pytest.param("fsdp", 2, marks=pytest.mark.slow)])
def test_ranks_that_saw_other_samples_send_the_same_bytes(strategy, ranks, tmp_path):
    model_dir = save(tmp_path / "qwen3", "qwen3", steps=2)
    script = Path(__file__).with_name("int8_engine_script.py")
    assert facts(script, ranks, strategy, model_dir) == {"groups": 6, "tensors": 36 + 21}
