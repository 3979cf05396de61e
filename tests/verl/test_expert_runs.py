"""Real verl with a mixture of experts: whole runs, bit-equal in every step."""

from __future__ import annotations

import pytest

from tests.verl.run_verl import M, R, Run, make_task
from tests.verl.test_e2e import TIMEOUT, finish


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT + 100)
@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp"])
def test_a_mixture_of_experts_is_exact(tmp_path, strategy):
    task = make_task(tmp_path, "qwen3_moe")
    environ = {"JETRL_PRECISION": "fp8-unified", "JETRL_MEASURE_ROUTES": "1"}
    steps = finish(Run(task, "trainer.use_v1=False", strategy=strategy, steps=3, environ=environ), 3)
    assert_exact(steps)
    for step in steps:  # three blocks, and of each sample its prompt and all tokens but the last
        assert step["jetrl/route_mismatch"] == 0.0 and step["jetrl/routes"] > 3 * step["jetrl/tokens"]


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT + 100)
def test_routes_differ_where_each_side_computes_by_itself(tmp_path):
    """V1, whose batches travel by the TransferQueue, with the pass for old log-probs."""
    environ = {"JETRL_PRECISION": "fp8-rollout", "JETRL_MEASURE_ROUTES": "1"}
    steps = finish(Run(make_task(tmp_path, "qwen3_moe"), steps=2, environ=environ), 2)
    assert all(0 < step["jetrl/route_mismatch"] < 0.5 and step["jetrl/routes"] > 3 * step["jetrl/tokens"] for step in steps)


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT + 100)
@pytest.mark.parametrize("trainer", ["V0", "V1"])
def test_the_trainer_replays_the_routes_of_the_rollout(tmp_path, trainer):
    """A pass without routes would end the run, so that every update has replayed them, its recomputation included."""
    environ = {"JETRL_PRECISION": "fp8-rollout", "JETRL_ROUTER_REPLAY": "R3"}
    extra = [f"trainer.use_v1={trainer == 'V1'}", f"{M}.enable_gradient_checkpointing=True"]
    for step in finish(Run(make_task(tmp_path, "qwen3_moe"), *extra, steps=3, environ=environ), 3):
        assert step["jetrl/routes_replayed"] == 1.0 and 0 < step["jetrl/route_mismatch"] < 0.5
        assert step["jetrl/routes"] > 3 * step["jetrl/tokens"] and step["jetrl/logp_abs_diff_mean"] > 0


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT + 100)
@pytest.mark.parametrize("experts", [1, 2], ids=["TP 2", "EP 2"])
def test_a_rollout_of_two_ranks_splits_experts(tmp_path, experts):
    task = make_task(tmp_path, "qwen3_moe", moe_intermediate_size=256)
    more = ("trainer.use_v1=False", f"{R}.expert_parallel_size={experts}")
    assert_exact(finish(Run(task, *more, processes=2, steps=3, environ={"JETRL_PRECISION": "fp8-unified"}), 3))


def assert_exact(steps):
    for step in steps:
        assert step["jetrl/bit_equal_fraction"] == 1.0 and step["jetrl/logp_abs_diff_max"] == 0.0
        assert step["jetrl/tokens"] >= 16 and step["jetrl/quantized_layers"] == 3 * (4 + 8 * 3)
        assert 0 < step["jetrl/sync_bytes"] <= 0.55 * step["jetrl/sync_bytes_bf16"]
