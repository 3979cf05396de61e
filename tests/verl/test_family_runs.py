"""Real verl with each text family that no other run has: bit-equal in every step."""

from __future__ import annotations

from pathlib import Path

import pytest

from jetrl_patch.models.families import FAMILIES
from tests.models import NO_OTHER_RUN
from tests.verl.run_verl import M, Run, make_task
from tests.verl.test_e2e import TIMEOUT, finish

#: what verl requires of a family's tokenizer
TOKENS = {"glm4_moe": ("<|observation|>", "<|user|>")}


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT + 100)
@pytest.mark.parametrize("family", NO_OTHER_RUN)
def test_a_family_is_exact(tmp_path: Path, family: str) -> None:
    routes = FAMILIES[family].mixture is not None
    environ = {"JETRL_PRECISION": "fp8-unified", **({"JETRL_MEASURE_ROUTES": "1"} if routes else {})}
    task = make_task(tmp_path, family, tokens=TOKENS.get(family, ()))
    for step in finish(Run(task, f"{M}.use_remove_padding=True", steps=3, environ=environ), 3):
        assert (step["jetrl/bit_equal_fraction"], step["jetrl/logp_abs_diff_max"]) == (1.0, 0.0)
        assert step["jetrl/tokens"] >= 16 and step["jetrl/quantized_layers"] > 0
        assert 0 < step["jetrl/sync_bytes"] <= 0.55 * step["jetrl/sync_bytes_bf16"]
        if routes:
            assert step["jetrl/route_mismatch"] == 0.0 and step["jetrl/routes"] > step["jetrl/tokens"]
