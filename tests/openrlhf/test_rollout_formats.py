"""Real OpenRLHF with INT8 and per-channel FP8 rollouts, and with QuRL's invariant scale: a few steps each."""

from __future__ import annotations

import json

import pytest

from tests.openrlhf.run_openrlhf import Run, make_task
from tests.openrlhf.test_e2e import TIMEOUT, assert_exact, finish

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(TIMEOUT + 100)]
INT8 = {"JETRL_PRECISION": "int8-rollout"}


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return make_task(tmp_path_factory.mktemp("task"))


def assert_measured(found: list[dict[str, float]]) -> None:
    for step in found:
        assert 1e-4 < step["jetrl/logp_abs_diff_mean"] < 0.2 and step["jetrl/bit_equal_fraction"] < 1.0, found
        assert step["jetrl/quantized_layers"] == 21 and step["jetrl/sync_calls"] == 3
        assert 0.5 < step["jetrl/sync_bytes"] / step["jetrl/sync_bytes_bf16"] < 0.52


def test_int8_with_invariant_scale_an_ema_and_a_saved_model(task, tmp_path):
    """The saved model records its scaling; the EMA is scaled with the policy, the reference is not."""
    extra = ["--train.enable_ema", "--ckpt.output_dir", str(tmp_path / "saved")]
    assert_measured(finish(Run(task, *extra, environ=INT8 | {"JETRL_INVARIANT_SCALE": "1.5"})))
    (config,) = (tmp_path / "saved").rglob("config.json")
    assert json.loads(config.read_text())["jetrl_invariant_scale"] == 1.5


def test_int8_on_two_ranks_under_zero3_with_invariant_scale(task):
    """Each rank sees different samples; the sync uses the activations of both."""
    assert_measured(finish(Run(task, environ=INT8 | {"JETRL_INVARIANT_SCALE": "1.5"}, stage=3, actors=2)))


def test_fp8_per_channel(task):
    environ = {"JETRL_PRECISION": "fp8-rollout", "JETRL_ROLLOUT_GRANULARITY": "channel", "JETRL_SMOOTHING": "0.5"}
    assert_measured(finish(Run(task, environ=environ)))


def test_the_unified_flow_stays_exact_with_invariant_scale(task):
    environ = {"JETRL_PRECISION": "fp8-unified", "JETRL_INVARIANT_SCALE": "2.0", "CUDA_VISIBLE_DEVICES": ""}
    assert_exact(finish(Run(task, environ=environ)))
