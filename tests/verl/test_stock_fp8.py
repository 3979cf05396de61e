"""verl's own FP8 rollout, unchanged and measured: the baseline that its users know."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.verl.run_verl import R, Run, make_task

TIMEOUT = 900
ROOT = Path(__file__).resolve().parents[2]

#: replaces vLLM's own kernel, which needs AMX
STAND_IN = """
import wrapt

@wrapt.when_imported("vllm.model_executor.kernels.linear")
def _(kernels):
    from tests.vllm.plain_fp8 import product
    from vllm.platforms import PlatformEnum
    kernels._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU] = [product(kernels)]
"""


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT + 100)
def test_verls_fp8_rollout_is_measured_and_nothing_else(tmp_path):
    task = make_task(tmp_path, fill=True)
    (task / "kernel").mkdir()
    (task / "kernel" / "sitecustomize.py").write_text(STAND_IN)
    environ = {"JETRL_PRECISION": "bf16", "VERL_DISABLE_TRITON_FP8": "1", "PYTHONPATH": f"{task}/kernel:{ROOT}"}
    run = Run(task, "trainer.use_v1=False", f"{R}.quantization=fp8", environ=environ)
    assert run.wait(TIMEOUT) == 0, run.failure
    steps = run.metrics()
    assert len(steps) == 2
    for step in steps:
        assert step["jetrl/logp_abs_diff_mean"] > 1e-3 and step["jetrl/bit_equal_fraction"] < 1.0
        assert step["jetrl/quantized_layers"] == 0  # the plugin quantizes no layer
