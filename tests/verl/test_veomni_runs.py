"""Real verl with its VeOmni engine and real vLLM rollouts on the CPU: GRPO on text, and on images and text."""

from __future__ import annotations

import os

import pytest

from tests import vision_models
from tests.veomni import environ, needs_veomni
from tests.verl.run_verl import A, M, R, Run, make_task
from tests.verl.test_e2e import TIMEOUT, finish
from tests.verl.test_vision_runs import make_task as make_vision_task

LINEAR = {"JETRL_PRECISION": "fp8-unified", "JETRL_ALIGN": "linear"}
ROLLOUT = {"JETRL_PRECISION": "fp8-rollout"}
V0, V1 = "trainer.use_v1=False", "trainer.use_v1=True"


def assert_share(step, mode):
    """FP8 bytes and scales take about half of BF16. With fp8-rollout the engine quantizes, and BF16 is sent."""
    share = step["jetrl/sync_bytes"] / step["jetrl/sync_bytes_bf16"]
    assert share == 1 if mode == ROLLOUT else 0.5 < share <= 0.55, step


@needs_veomni
@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT + 100)
@pytest.mark.parametrize(
    ("mode", "extra", "apart"),
    [
        # as in verl's own script, with a reference model, offload, and a loss in addition to the log-probs
        (LINEAR, (V1, f"{M}.use_fused_kernels=True", f"{M}.enable_gradient_checkpointing=True"), 0.1),
        (LINEAR, (V0, f"{A}.use_kl_loss=True", f"{A}.veomni.param_offload=True", f"{A}.veomni.optimizer_offload=True"), 0.1),
        (ROLLOUT, (V1, f"{A}.use_kl_loss=True", "trainer.save_freq=2"), 0.2),
    ],
)
def test_a_dense_model(mode, extra, apart, tmp_path):
    task = make_task(tmp_path, fill=True)  # weights after a few steps, and no token that only the rollout bans
    found = finish(Run(task, *extra, strategy="veomni", processes=2, environ={**mode, **environ()}))
    for step in found:
        assert 0 < step["jetrl/logp_abs_diff_mean"] < apart, found
        assert step["jetrl/quantized_layers"] == 21 and step["jetrl/tokens"] >= 16
        assert_share(step, mode)
    if "trainer.save_freq=2" in extra:  # what a checkpoint was saved with
        (record,) = tmp_path.rglob("jetrl.json")
        assert record.parent.name == "actor"


#: verl's VeOmni engine has the numbers of Qwen's placeholders in its code; the small models have others
PLACES = """
import wrapt

@wrapt.when_imported("verl.workers.engine.veomni.utils")
def _small(module):
    module.VL_TYPE2INDEX.update(dict.fromkeys(("qwen3_vl", "qwen3_vl_moe"), {table}))
"""


@needs_veomni
@vision_models.needs_images
@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT + 100)
@pytest.mark.parametrize(
    ("family", "mode", "extra", "apart"),
    [
        ("qwen3_vl", LINEAR, (V1, f"{M}.use_fused_kernels=True", f"{A}.veomni.param_offload=True"), 0.1),
        ("qwen3_vl_moe", LINEAR, (V1, f"{A}.use_kl_loss=True", f"{M}.enable_gradient_checkpointing=True"), 0.15),
        ("qwen3_vl_moe", ROLLOUT, (V0,), 0.25),
    ],
)
def test_a_model_that_sees(family, mode, extra, apart, tmp_path):
    task = make_vision_task(tmp_path, family, False)
    config = vision_models.config_of(family)
    table = {"IMAGE_INPUT_INDEX": config.image_token_id, "VIDEO_INPUT_INDEX": config.video_token_id}
    (tmp_path / "sitecustomize.py").write_text(PLACES.format(table=table))
    paths = {"PYTHONPATH": os.pathsep.join((str(tmp_path), environ()["PYTHONPATH"]))}
    sizes = ("data.max_prompt_length=64", f"{R}.max_model_len=96", "data.image_key=images")
    found = finish(Run(task, *sizes, *extra, strategy="veomni", processes=2, environ={**mode, **paths}))
    for step in found:
        assert 0 < step["jetrl/logp_abs_diff_mean"] < apart, found
        assert_share(step, mode)
