"""Real OpenRLHF in FP16, with an FP8 KV cache, and with an FP32 ``lm_head``: a few steps each."""

from __future__ import annotations

import pytest

from tests.openrlhf.run_openrlhf import Run, make_task
from tests.openrlhf.test_e2e import TIMEOUT, assert_exact, finish

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(TIMEOUT + 100)]
FP16 = {"JETRL_PRECISION": "fp16"}
WIDE = {"JETRL_HEAD_DTYPE": "float32"}


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return make_task(tmp_path_factory.mktemp("task"), fill=True)


def assert_fp16(found: list[dict[str, float]]) -> None:
    for step in found:
        assert 0 < step["jetrl/logp_abs_diff_mean"] < 4e-3 and step["jetrl/tokens"] >= 16, found
        assert step["jetrl/sync_bytes_total"] > 0 and step["jetrl/sync_seconds"] > 0
        assert step["jetrl/loss_scale"] >= 2.0**10 and step["jetrl/skipped_steps"] <= 2, found


def test_fp16_zero2_with_a_reference_model(task):
    run = Run(task, environ=FP16)
    assert_fp16(finish(run))
    assert "--ds.param_dtype fp16" in run.text and "set dtype='float16' instead of 'bfloat16'" in run.text


def test_fp16_zero3_on_two_ranks(task):
    assert_fp16(finish(Run(task, environ=FP16, stage=3, actors=2)))


def test_a_checkpoint_beyond_fp16_is_refused_by_name(tmp_path):
    from safetensors.torch import load_file, save_file

    folder = make_task(tmp_path, fill=True)
    path = folder / "model" / "model.safetensors"
    weights = load_file(path)
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = 70000.0
    save_file(weights, path, metadata={"format": "pt"})
    run = Run(folder, environ=FP16)
    assert run.wait(TIMEOUT) != 0
    assert "model.layers.1.mlp.up_proj.weight has Inf" in run.text and "does not fit FP16" in run.text


def test_overflowing_steps_are_skipped_and_counted(task, tmp_path):
    """The first update's loss overflows. DeepSpeed tolerates one overflow before it halves its scale."""
    place = tmp_path / "hook"
    place.mkdir()
    (place / "sitecustomize.py").write_text(
        """
import wrapt

@wrapt.when_imported("openrlhf.utils.deepspeed.deepspeed")
def _(module):
    backward, calls = module.DeepspeedStrategy.backward, []
    def too_great(self, loss, *args, **kwargs):
        calls.append(1)
        return backward(self, loss * (1e30 if len(calls) <= 2 else 1.0), *args, **kwargs)
    module.DeepspeedStrategy.backward = too_great
"""
    )
    found = finish(Run(task, environ=FP16 | {"PYTHONPATH": str(place)}, steps=3), 3)
    skipped = [step["jetrl/skipped_steps"] for step in found]
    assert skipped[0] == 1 and skipped[1] == skipped[2] <= 2, found  # 2^16 alone may be too large
    assert [step["jetrl/loss_scale"] for step in found] == [2.0 ** (17 - count) for count in skipped], found


def test_fp8_kv_cache_in_bf16(task):
    for step in finish(Run(task, environ={"JETRL_PRECISION": "bf16", "JETRL_KV_CACHE": "fp8"})):
        assert 5e-3 < step["jetrl/logp_abs_diff_mean"] < 0.5, step


def test_a_wider_head_is_exact(task):
    assert_exact(finish(Run(task, environ={"JETRL_PRECISION": "fp8-unified"} | WIDE)))


@pytest.mark.parametrize("environ", [{"JETRL_PRECISION": "bf16"}, {"JETRL_PRECISION": "fp8-unified", "JETRL_ALIGN": "linear"}])
def test_a_wider_head_in_the_other_modes(task, environ):
    for step in finish(Run(task, environ=environ | WIDE)):
        assert 0 < step["jetrl/logp_abs_diff_mean"] < 0.2, step
