"""Real verl runs with ``old_log_probs="rollout"`` end with the weights of runs that compute them, bit for bit.

Two runs see the same samples because a hook seeds them (``seeded``) and orders V1's batches, which otherwise follow the time at
which samples arrive.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch

from tests.checkpoint.test_resume import plain, shards
from tests.verl.run_verl import A, R, Run
from tests.verl.seeded import make_seeded_task

TIMEOUT = 1800
#: steps of each run; 30 were run for the pages
STEPS = int(os.environ.get("STEPS_OF_RUNS", "3"))
ROLLOUT = {"JETRL_OLD_LOG_PROBS": "rollout"}
RECOMPUTE = {"JETRL_OLD_LOG_PROBS": "recompute"}
V0, V1 = "trainer.use_v1=False", "trainer.use_v1=True"
C = "algorithm.rollout_correction"

HOOK = """
import functools, os, wrapt

@wrapt.when_imported("verl.experimental.agent_loop.agent_loop")
def _(module):
    seeded = module.AgentLoopWorker._run_agent_loop
    async def _run_agent_loop(self, sampling_params, trajectory, **kwargs):
        result = await seeded(self, sampling_params, trajectory, **kwargs)
        number = int(kwargs.get("session_id", trajectory["rollout_n"]))
        if os.environ.get("ONE_ULP_IN_STEP") == str(trajectory["step"]) and number == 1:
            import torch
            result.response_logprobs.view(torch.int32)[0, 0] += 1
        return result
    module.AgentLoopWorker._run_agent_loop = _run_agent_loop

@wrapt.when_imported("verl.workers.engine_workers")
def _(module):
    original = module.ActorRolloutRefWorker.compute_log_prob
    @functools.wraps(original)
    def compute_log_prob(self, data):
        print(f"PASS OVER {len(data)} SAMPLES", flush=True)
        return original(self, data)
    module.ActorRolloutRefWorker.compute_log_prob = compute_log_prob

@wrapt.when_imported("verl.trainer.ppo.v1.replay_buffer")
def _(module):
    original = module.ReplayBuffer._materialize_batch
    def _materialize_batch(self, partition_id, *args):
        batch = original(self, partition_id, *args)
        fields = module.tq.kv_batch_get(keys=batch.keys, partition_id=partition_id, select_fields=["input_ids"])
        rows = [row.tolist() for row in fields["input_ids"].unbind()]
        batch.reorder(sorted(range(len(rows)), key=rows.__getitem__))
        return batch
    module.ReplayBuffer._materialize_batch = _materialize_batch
"""

#: a trainer made wrong after its weights were sent, and a line for each of its updates
WRONG = """
@wrapt.when_imported("verl.workers.engine_workers")
def _(module):
    original = module.ActorRolloutRefWorker.update_actor
    @functools.wraps(original)
    def update_actor(self, data):
        make_wrong(self.actor.engine.module, os.environ.get("WRONG_TRAINER"), data)
        return original(self, data)
    module.ActorRolloutRefWorker.update_actor = update_actor

def make_wrong(model, what, data):
    import dataclasses, torch
    from verl.utils import tensordict_utils
    if what == "norm":
        weight = model.get_parameter("model.layers.1.input_layernorm.weight")
        shard = getattr(weight, "_local_tensor", weight)
        assert shard.dtype == torch.float32
        shard.data.view(torch.int32)[3] += 1 << 16  # one ulp of BF16
    elif what == "scale":
        state = model.get_submodule("model.layers.0.mlp.down_proj").fp8
        quantized = state.quantized
        def changed(*args, **kwargs):
            found = quantized(*args, **kwargs)
            scales = found.s.clone()
            scales.view(torch.int32)[0, 0] ^= 1 << 23  # powers of two have no other bits
            return dataclasses.replace(found, s=scales)
        state.quantized = changed
    elif what == "temperature":
        tensordict_utils.assign_non_tensor(data, temperature=1.01)

@wrapt.when_imported("verl.workers.engine.fsdp.transformer_impl")
def _(module):
    original = module.FSDPEngine.optimizer_step
    def optimizer_step(self):
        print("AN UPDATE", flush=True)
        return original(self)
    module.FSDPEngine.optimizer_step = optimizer_step
"""


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return make_seeded_task(tmp_path_factory.mktemp("task"), HOOK + WRONG)


class Finished:
    """A run to its end: the samples of each pass, the metrics of each step, and the weights and optimizer states."""

    def __init__(
        self, task: Path, out: Path, *extra: str, processes: int = 1, strategy: str = "fsdp2", **environ: str
    ) -> None:
        environ = {"JETRL_PRECISION": "fp8-unified", "PYTHONPATH": str(task / "hook"), **environ}
        save = [f"trainer.default_local_dir={out}", f"trainer.save_freq={STEPS}"]
        run = Run(task, *save, *extra, steps=STEPS, processes=processes, strategy=strategy, environ=environ)
        self.rc = run.wait(TIMEOUT)
        self.text, self.failure = run.text, run.failure
        self.passes = [int(count) for count in re.findall(r"PASS OVER (\d+) SAMPLES", self.text)]
        self.steps = run.metrics()
        self.out, self.ranks = out / f"global_step_{STEPS}" / "actor", processes

    def weights(self) -> list[torch.Tensor]:
        assert self.rc == 0, self.failure
        found = plain(shards(self.out, self.ranks))
        assert len(found) > 90
        return found


def same(a: Finished, b: Finished) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.weights(), b.weights(), strict=True))


def assert_checked(found: Finished) -> None:
    assert found.rc == 0 and len(found.steps) == STEPS, found.failure
    for step in found.steps:
        assert step["jetrl/bit_equal_fraction"] == 1.0 and step["jetrl/logp_abs_diff_max"] == 0.0
        assert step["jetrl/audited_tokens"] == step["jetrl/tokens"] >= 16
    for name in ("actor/entropy:", "mfu/actor_infer", "rollout_probs_diff"):
        assert name not in found.text


@pytest.fixture(scope="module")
def recomputed(task, tmp_path_factory):
    found = Finished(task, tmp_path_factory.mktemp("recomputed"), V0, **RECOMPUTE)
    assert found.rc == 0 and found.passes == [16] * STEPS, found.failure
    assert all("jetrl/audited_tokens" not in step for step in found.steps) and "actor/entropy:" in found.text
    return found


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT + 100)
def test_no_pass_runs_and_every_token_is_compared(task, tmp_path):
    found = Finished(task, tmp_path, V0)  # the default
    assert_checked(found)
    assert found.passes == [] and found.text.count("AN UPDATE") == STEPS


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(2 * TIMEOUT + 100)
def test_v0_ends_with_the_same_weights(task, recomputed, tmp_path):
    found = Finished(task, tmp_path, V0, **ROLLOUT)
    assert found.passes == [] and same(found, recomputed)
    assert [step["critic/rewards/mean"] for step in found.steps] == [
        step["critic/rewards/mean"] for step in recomputed.steps
    ]


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(2 * TIMEOUT + 100)
def test_v1_ends_with_the_same_weights(task, tmp_path):
    expected = Finished(task, tmp_path / "recomputed", V1, **RECOMPUTE)
    found = Finished(task, tmp_path / "rollout", V1, **ROLLOUT)
    assert_checked(found)
    assert expected.passes == [16] * STEPS and found.passes == [] and same(found, expected)


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(2 * TIMEOUT + 100)
@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_two_ranks_end_with_the_same_weights(task, tmp_path, strategy):
    """The rollout has two ranks too."""
    two = {"processes": 2, "strategy": strategy}
    expected = Finished(task, tmp_path / "recomputed", V0, **two, **RECOMPUTE)
    found = Finished(task, tmp_path / "rollout", V0, **two, **ROLLOUT)
    assert_checked(found)
    assert expected.passes and not found.passes and same(found, expected)


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(2 * TIMEOUT + 100)
@pytest.mark.parametrize("version", [V0, V1])
def test_several_updates_with_kl_in_the_reward_end_with_the_same_weights(task, tmp_path, version):
    """A share of the samples goes through the pass. Dynamic micro-batches, packed; 8 updates a step."""
    extra = [
        version, "algorithm.use_kl_in_reward=True", f"{A}.ppo_mini_batch_size=1", f"{A}.ppo_epochs=2",
        f"{A}.use_dynamic_bsz=True", f"{A}.ppo_max_token_len_per_gpu=64", f"{R}.log_prob_max_token_len_per_gpu=128",
        "actor_rollout_ref.model.use_remove_padding=True", "algorithm.kl_ctrl.kl_coef=0.1",
    ]  # fmt: skip
    expected = Finished(task, tmp_path / "recomputed", *extra, **RECOMPUTE)
    found = Finished(task, tmp_path / "rollout", *extra, JETRL_AUDIT_FRACTION="0.25", **ROLLOUT)
    assert_checked(found)
    assert expected.passes == [16] * STEPS and found.passes == [4] * STEPS and same(found, expected)


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(2 * TIMEOUT + 100)
def test_one_ulp_stops_the_run_or_brings_the_pass_back(task, recomputed, tmp_path):
    stopped = Finished(task, tmp_path / "stopped", V0, ONE_ULP_IN_STEP="2", **ROLLOUT)
    assert stopped.rc != 0 and len(stopped.steps) == 1
    assert re.search(r"AuditError: log-prob of response token 0 of sample \d+: required the rollout's", stopped.text)
    went_on = Finished(
        task, tmp_path / "on", V0, ONE_ULP_IN_STEP="2", JETRL_ON_MISMATCH="recompute", **ROLLOUT
    )
    assert same(went_on, recomputed) and went_on.passes == [16] * (STEPS - 2)
    assert [step["jetrl/bit_equal_fraction"] < 1 for step in went_on.steps] == [i == 1 for i in range(STEPS)]


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT + 100)
@pytest.mark.parametrize(
    ("extra", "says", "updates"),
    [
        ([], r"log-prob of response token 0 of sample \d+: required the rollout's", 1),
        ([f"{C}.bypass_mode=true"], r"log-probs of a step: required equal ones on both sides, found 0\.\d+ of", 2),
    ],
    ids=["the pass", "bypass"],
)
def test_one_ulp_stops_the_run_where_the_pass_runs_or_the_loss_compares(task, tmp_path, extra, says, updates):
    found = Finished(task, tmp_path, V0, *extra, ONE_ULP_IN_STEP="2", **RECOMPUTE)
    assert found.rc != 0 and len(found.steps) == 1 and found.text.count("AN UPDATE") == updates, found.failure
    assert re.search(f"AuditError: {says}", found.text)


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT + 100)
def test_one_ulp_on_one_of_two_ranks_stops_both(task, tmp_path):
    """The other rank waits in a collective; Ray ends it with the run."""
    found = Finished(task, tmp_path, V0, processes=2, ONE_ULP_IN_STEP="2", **ROLLOUT)
    assert found.rc != 0 and len(found.steps) == 1 and "AuditError: log-prob of response token 0" in found.text


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT + 100)
@pytest.mark.parametrize("what", ["norm", "scale", "temperature"])
def test_a_trainer_that_is_wrong_stops_at_the_first_step(task, tmp_path, what):
    """One weight off by one ulp, one bit of one scale, another temperature: none of them makes an update."""
    found = Finished(task, tmp_path, V0, WRONG_TRAINER=what, **ROLLOUT)
    assert found.rc != 0 and not found.steps and "AN UPDATE" not in found.text, found.failure
    assert re.search(r"AuditError: log-prob of response token \d+ of sample \d+: required the rollout's", found.text)
