"""Real OpenRLHF with a mixture of experts: whole runs, bit-equal in every step."""

from __future__ import annotations

import pytest

from tests.openrlhf.run_openrlhf import Run, make_task
from tests.openrlhf.test_e2e import TIMEOUT, UNIFIED, finish


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT + 100)
@pytest.mark.parametrize("stage", [2, 3])
def test_a_mixture_of_experts_is_exact(tmp_path, stage):
    run = Run(make_task(tmp_path, "qwen3_moe"), environ=UNIFIED, steps=3, stage=stage)
    for step in finish(run, 3):
        assert step["jetrl/bit_equal_fraction"] == 1.0 and step["jetrl/logp_abs_diff_max"] == 0.0
        assert step["jetrl/tokens"] >= 16 and step["jetrl/quantized_layers"] == 3 * (4 + 8 * 3)
        assert 0 < step["jetrl/sync_bytes"] <= 0.55 * step["jetrl/sync_bytes_bf16"]
