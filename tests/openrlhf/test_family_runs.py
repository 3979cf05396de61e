"""Real OpenRLHF with each text family that no other run has: bit-equal in every step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models import NO_OTHER_RUN
from tests.openrlhf.run_openrlhf import Run, make_task
from tests.openrlhf.test_e2e import TIMEOUT, UNIFIED, finish


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT + 100)
@pytest.mark.parametrize("family", NO_OTHER_RUN)
def test_a_family_is_exact(tmp_path: Path, family: str) -> None:
    for step in finish(Run(make_task(tmp_path, family), environ=UNIFIED, steps=3), 3):
        assert (step["jetrl/bit_equal_fraction"], step["jetrl/logp_abs_diff_max"]) == (1.0, 0.0)
        assert step["jetrl/tokens"] >= 16 and step["jetrl/quantized_layers"] > 0
        assert 0 < step["jetrl/sync_bytes"] <= 0.55 * step["jetrl/sync_bytes_bf16"]
