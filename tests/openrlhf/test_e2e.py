"""Real OpenRLHF with real vLLM rollouts, a few steps on the CPU: equality and metrics of whole runs."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from tests.openrlhf.run_openrlhf import Run, arguments, make_task
from tests.process_run import ProcessRun
from tests.ray.cluster import Cluster
from tests.rescore_script import rescore
from tests.verl.test_e2e import _stopper

TIMEOUT = 900
UNIFIED = {"JETRL_PRECISION": "fp8-unified", "CUDA_VISIBLE_DEVICES": ""}

DYNAMIC = [
    "--ds.packing_samples", "--train.dynamic_batch_enable", "--train.max_tokens_per_gpu", "128",
    "--rollout.max_tokens_per_gpu", "128",
]  # fmt: skip

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(TIMEOUT + 100)]


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return make_task(tmp_path_factory.mktemp("task"))


def finish(run: Run, steps: int = 2) -> list[dict[str, float]]:
    assert run.wait(TIMEOUT) == 0, run.failure
    found = run.metrics()
    assert len(found) == steps, run.failure
    return found


def assert_exact(found: list[dict[str, float]], engines: int = 1) -> None:
    for step in found:
        assert step["jetrl/bit_equal_fraction"] == 1.0, found
        assert step["jetrl/logp_abs_diff_max"] == 0.0 and step["jetrl/tokens"] >= 16
        assert step["jetrl/quantized_layers"] == 21
        assert 0 < step["jetrl/sync_bytes"] <= 0.55 * step["jetrl/sync_bytes_bf16"]
        assert step["jetrl/sync_calls"] == 3 * engines  # begin, one bucket, end


@pytest.mark.pins
def test_zero2_with_a_reference_model(task):
    """Of a user's shell script, with nothing but the variable in front of it."""
    assert_exact(finish(Run(task, environ=UNIFIED, by_script=True, steps=3), 3))


@pytest.mark.parametrize(
    "extra",
    [
        [],
        ["--train.batch_size", "4", "--train.max_epochs", "2"],
        ["--train.colocate_all"],
        [*DYNAMIC, "--train.batch_size", "4"],
        ["--algo.kl.use_loss", "--algo.kl.estimator", "k2", "--train.enable_ema"],
    ],
)
@pytest.mark.slow
def test_the_rollouts_log_probs_are_what_the_pass_would_give(task, tmp_path, extra):
    """Where both give the loss the same tensors, the run cannot train other weights. The pass runs here only to compare."""
    environ = {**UNIFIED, "JETRL_OLD_LOG_PROBS": "rollout", "PYTHONPATH": str(_comparer(tmp_path))}
    run = Run(task, *extra, environ=environ, steps=3)
    found = finish(run, 3)
    assert_exact(found)
    assert len(re.findall(r"THE PASS GIVES THE SAME FOR [1-9]", run.text)) == 3
    assert all(step["jetrl/audited_tokens"] == step["jetrl/tokens"] for step in found)


def _comparer(folder: Path) -> Path:
    """Write a sitecustomize that also runs the skipped pass and compares its tensors with the replacements."""
    (folder / "sitecustomize.py").write_text(
        """
import wrapt

@wrapt.when_imported("jetrl_patch.adapters.openrlhf.logprob")
def _(module):
    make = module.dispatch_forward
    def dispatch_forward(original):
        ours = make(original)
        def both(self, group, sync_condition, **kwargs):
            import torch
            skips = module.DRIVER.skipped is not None and group is self.actor_model_group
            refs = ours(self, group, sync_condition, **kwargs)
            if skips:
                taken = self._flatten_results(refs, 1)
                computed = self._flatten_results(original(self, group, sync_condition, **kwargs), 1)
                assert [t.dtype for t in taken] == [c.dtype for c in computed]
                assert all(torch.equal(t, c) for t, c in zip(taken, computed, strict=True)), (taken, computed)
                print("THE PASS GIVES THE SAME FOR", len(taken), flush=True)
            return refs
        return both
    module.dispatch_forward = dispatch_forward
"""
    )
    return folder


@pytest.mark.slow
def test_zero3_on_two_ranks(task):
    assert_exact(finish(Run(task, environ=UNIFIED, stage=3, actors=2)))


@pytest.mark.slow
def test_zero2_on_two_ranks_with_tensor_parallel_rollout(task):
    assert_exact(finish(Run(task, "--vllm.tensor_parallel_size", "2", environ=UNIFIED, actors=2)))


@pytest.mark.slow
def test_colocated(task):
    """Weights go through the memory of the device, without a process group of trainer and engines."""
    assert_exact(finish(Run(task, "--train.colocate_all", environ=UNIFIED)))


@pytest.mark.slow
def test_packed_and_in_dynamic_batches(task):
    assert_exact(finish(Run(task, *DYNAMIC, environ=UNIFIED)))


@pytest.mark.slow
def test_critic_ema_entropy_temperature_prefix_caching_and_two_engines(task):
    extra = [
        "--algo.advantage.estimator", "gae", "--critic.num_nodes", "1", "--critic.num_gpus_per_node", "1",
        "--train.enable_ema", "--rollout.temperature", "0.7", "--actor.entropy_coef", "0.01",
        "--vllm.enable_prefix_caching", "--vllm.num_engines", "2",
    ]  # fmt: skip
    assert_exact(finish(Run(task, *extra, environ=UNIFIED, stage=1)), engines=2)


@pytest.mark.slow
def test_options_that_change_no_log_prob(task):
    """Some of those for which ``test_options.py`` gives a reason alone, where the reason is about code that runs."""
    extra = [
        "--train.full_determinism_enable", "--actor.gradient_checkpointing_enable", "--actor.gradient_checkpointing_reentrant",
        "--ds.grad_accum_dtype", "fp32", "--ds.overlap_comm", "--data.disable_fast_tokenizer", "--ref.offload",
        "--actor.policy_loss_type", "gspo", "--actor.loss_agg_mode", "seq-mean-token-mean", "--actor.dual_clip", "3",
        "--algo.kl.use_loss", "--algo.kl.estimator", "k3", "--algo.kl.unbiased_gradient", "--train.max_epochs", "2",
    ]  # fmt: skip
    assert_exact(finish(Run(task, *extra, environ=UNIFIED)))


@pytest.mark.slow
def test_asynchronous_with_partial_rollouts(task):
    """Samples of the trainer's current weights are equal. Others may come from older weights, which is measured."""
    run = Run(task, "--train.async_enable", "--train.partial_rollout_enable", environ=UNIFIED, steps=4)
    found = finish(run, steps=4)
    assert found[0]["jetrl/bit_equal_fraction"] == 1.0 and found[0]["jetrl/stale_fraction"] == 0.0
    assert any(step["jetrl/stale_fraction"] > 0 for step in found)
    for number, step in enumerate(found, start=1):
        assert step.get("jetrl/bit_equal_fraction_current", 1.0) == 1.0
        assert 1 <= step["jetrl/version_first"] <= step["jetrl/version_last"] <= number


@pytest.mark.slow
def test_asynchronous_samples_are_equal_under_the_version_that_made_them(task, tmp_path):
    """Each sample is rescored, outside the run, with the checkpoint of the version that it records."""
    environ = {**UNIFIED, "PYTHONPATH": str(_dumper(tmp_path))}
    extra = ["--train.async_enable", "--ckpt.save_steps", "1", "--ckpt.save_hf"]
    extra += ["--ckpt.path", str(tmp_path / "checkpoints"), "--ckpt.max_num", "9"]
    finish(Run(task, *extra, environ=environ, steps=4), steps=4)
    checkpoints = tmp_path / "checkpoints" / "global_step{v}_hf"
    tokens, equal, versions, late = rescore(tmp_path, 0, task / "model", str(checkpoints), stop=1)
    assert equal == tokens >= 100 and versions >= 2 and late > 0


def _dumper(folder: Path) -> Path:
    """Write a sitecustomize that saves every sample: tokens, mask, rollout log-probs, its version, the trainer's version."""
    (folder / "sitecustomize.py").write_text(
        f"""
import wrapt

@wrapt.when_imported("openrlhf.trainer.ppo_utils.experience_maker")
def _(module):
    original = module.RemoteExperienceMaker.make_experience
    def make_experience(self, samples_list):
        import os, time, torch
        from jetrl_patch.adapters.openrlhf.state import DRIVER
        rows = []
        for e in samples_list:
            first, last = e.info["jetrl/version_first"], e.info["jetrl/version_last"]
            for i in range(len(e.sequences)):
                assert first[i] == last[i]
                n = int(e.attention_mask[i].sum())
                row = e.sequences[i, :n], e.action_mask[i, : n - 1], e.rollout_log_probs[i, : n - 1]
                rows.append((*(t.clone() for t in row), int(first[i]) - 1, DRIVER.version - 1))  # syncs count from 1
        torch.save(rows, os.path.join({str(folder)!r}, f"samples-{{time.monotonic_ns()}}.pt"))
        return original(self, samples_list)
    module.RemoteExperienceMaker.make_experience = make_experience
"""
    )
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environ", "least", "extra"),
    [
        ({"JETRL_PRECISION": "bf16"}, 1e-4, []),
        ({"JETRL_PRECISION": "fp8-rollout"}, 1e-3, ["--algo.advantage.is_correction_level", "token"]),
        ({"JETRL_PRECISION": "fp8-unified", "JETRL_ALIGN": "linear"}, 1e-4, []),
    ],
)
def test_the_other_modes_are_measured(task, environ, least, extra):
    for step in finish(Run(task, *extra, environ=environ)):
        assert step["jetrl/logp_abs_diff_mean"] > least and step["jetrl/bit_equal_fraction"] < 1.0
        assert step["jetrl/sync_seconds"] > 0
        assert step["jetrl/sync_calls"] == (36 if environ["JETRL_PRECISION"] == "bf16" else 3)


@pytest.mark.slow
@pytest.mark.timeout(2 * TIMEOUT + 100)
def test_a_vllm_worker_killed_during_a_sync_stops_the_run_in_bounded_time(task):
    environ = {**UNIFIED, "JETRL_SYNC_TIMEOUT": "20", "PYTHONPATH": str(_stopper(task))}
    run = Run(task, environ=environ, steps=8)
    run.wait_for(lambda text: "STOPPED IN SYNC" in text, TIMEOUT)
    worker = int(re.findall(r"STOPPED IN SYNC (\d+)", run.text)[-1])
    os.kill(worker, signal.SIGKILL)
    assert run.wait(TIMEOUT) != 0
    assert "SyncError" in run.text


@pytest.mark.slow
def test_an_argument_that_contradicts_ours_stops_the_run_before_any_actor(task):
    run = Run(task, "--ds.load_in_4bit", environ=UNIFIED)
    assert run.wait(TIMEOUT) == 1
    assert "OpenRLHF's --ds.load_in_4bit" in run.text and "PolicyModelActor" not in run.text


LATE = """
import runpy
import sys

import jetrl_patch
import ray

early = sys.argv.pop(1) == "early"
if early:
    jetrl_patch.enable(precision="fp8-unified")
ray.init(num_cpus=4, num_gpus=4, include_dashboard=False)
if not early:
    jetrl_patch.enable(precision="fp8-unified")
runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__", alter_sys=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("when", ["late", "early"])
def test_a_driver_that_connects_before_enable_ends_in_one_sentence(task, when):
    """A script of the user's own with a connection of its own: workers that exist cannot be patched, so nothing trains."""
    (task / "driver.py").write_text(LATE)
    words = [sys.executable, str(task / "driver.py"), when, *arguments(task, steps=1)]
    run = ProcessRun(task, lambda ray_dir: (words, {"RAY_TMPDIR": ray_dir}), {"VLLM_CPU_KVCACHE_SPACE": "1"})
    code, trained = run.wait(TIMEOUT), "Global step" in run.text
    assert (code, trained) == ((0, True) if when == "early" else (1, False)), run.failure
    if when == "late":
        (line,) = re.findall(r"^jetrl_patch\.errors\.NotPatchedError: (.*)$", run.text, re.MULTILINE) or [run.failure]
        assert line.startswith("enable() in a Ray driver: required a call before ray.init"), line
        assert "PolicyModelActor" not in run.text


@pytest.mark.slow
def test_two_nodes(task):
    """Policy, reference and engine need three logical GPUs, more than any one node has."""
    cluster = Cluster()
    try:
        cluster.start("head", gpus=1)
        cluster.start("second", gpus=2, VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1")
        run = Run(task, environ={**UNIFIED, "RAY_ADDRESS": cluster.address, "RAY_AUTH_MODE": "disabled"})
        assert_exact(finish(run))
    finally:
        cluster.stop()
    seen = re.findall(r"jetrl_patch: (.+) pid \d+ on \S+ \(raylet (\d+)\): fp8-unified, 21 FP8 layers", run.text)
    assert {role for role, _ in seen} == {"policy actor", "reference actor", "vLLM worker"}, seen
    assert len({raylet for _, raylet in seen}) == 2, seen
