"""Real OpenRLHF runs with ``old_log_probs="rollout"`` end with the weights of runs that compute them, bit for bit.

Two runs see the same samples because a hook of the test seeds each request by its prompt, and orders what comes back, which
otherwise follows the time at which samples arrive.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.openrlhf.run_openrlhf import Run, make_task

TIMEOUT = 1800
#: optimizer steps of each run; 30 were run for the pages
STEPS = int(os.environ.get("STEPS_OF_RUNS", "3"))
UNIFIED = {"JETRL_PRECISION": "fp8-unified", "CUDA_VISIBLE_DEVICES": ""}
ROLLOUT = {"JETRL_OLD_LOG_PROBS": "rollout"}
RECOMPUTE = {"JETRL_OLD_LOG_PROBS": "recompute"}
#: what a step prints of its updates: of the same samples and weights in both runs
OF_THE_UPDATE = ("policy_loss", "actor_grad_norm", "reward", "return", "response_length", "jetrl/tokens")

HOOK = """
import os, wrapt, zlib

@wrapt.when_imported("openrlhf.utils.agent")
def _(module):
    original, made = module.SingleTurnAgentExecutor.execute, {}
    async def execute(self, prompt, label, sampling_params, *args, **kwargs):
        made[prompt] = made.get(prompt, 0) + 1
        seeded = sampling_params.clone()
        seeded.seed = zlib.crc32(f"{prompt} {made[prompt]}".encode())
        seeded.__dict__.pop("sampling_type", None)  # cached, of a request without a seed
        return await original(self, prompt, label, seeded, *args, **kwargs)
    module.SingleTurnAgentExecutor.execute = execute

@wrapt.when_imported("openrlhf.trainer.ppo_utils.samples_generator")
def _(module):
    original, calls = module.SamplesGenerator._generate_vllm, []
    def _generate_vllm(self, *args, **kwargs):
        import torch
        found, *others = original(self, *args, **kwargs)
        found.sort(key=lambda experience: (experience.prompts[0], experience.sequences[0].tolist()))
        calls.append(1)
        if os.environ.get("ONE_ULP_IN_STEP") == str(len(calls)):
            first = int(found[1].action_mask[0].nonzero()[0])
            found[1].rollout_log_probs.view(torch.int32)[0, first] += 1
        return found, *others
    module.SamplesGenerator._generate_vllm = _generate_vllm

@wrapt.when_imported("openrlhf.trainer.ppo_utils.experience_maker")
def _(module):
    original = module.RemoteExperienceMaker._dispatch_forward
    def _dispatch_forward(self, group, sync_condition, **kwargs):
        name = "PASS" if group is self.actor_model_group else "OTHER PASS"
        print(f"A {name} OVER {sum(len(rows) for rows in kwargs['sequences'])} SAMPLES", flush=True)
        return original(self, group, sync_condition, **kwargs)
    module.RemoteExperienceMaker._dispatch_forward = _dispatch_forward
"""

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(2 * TIMEOUT + 100)]


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    folder = make_task(tmp_path_factory.mktemp("task"))
    (folder / "hook").mkdir()
    (folder / "hook" / "sitecustomize.py").write_text(HOOK)
    return folder


class Finished:
    """A run to its end: the samples of each pass of the policy, the metrics of each step, and the weights."""

    def __init__(self, task: Path, out: Path, *extra: str, stage: int = 2, actors: int = 1, **environ: str) -> None:
        environ = {**UNIFIED, "PYTHONPATH": str(task / "hook"), **environ}
        places = ["--ckpt.output_dir", str(out), "--data.max_samples", "64", "--train.num_episodes", str(-(-STEPS // 16))]
        end = ["--data.max_samples", str(4 * STEPS)] if STEPS < 16 else []
        run = Run(task, *places, *end, *extra, environ=environ, steps=STEPS, stage=stage, actors=actors)
        self.rc = run.wait(TIMEOUT)
        self.text, self.out = run.text, out
        self.passes = [int(count) for count in re.findall(r"A PASS OVER (\d+) SAMPLES", self.text)]
        self.steps = run.metrics()

    def weights(self) -> dict[str, torch.Tensor]:
        assert self.rc == 0, self.text[-6000:]
        files = sorted(self.out.glob("*.safetensors"))
        assert files
        return {name: tensor for file in files for name, tensor in load_file(file).items()}


def same(a: Finished, b: Finished) -> bool:
    x, y = a.weights(), b.weights()
    figures = [[{name: step.get(name) for name in OF_THE_UPDATE} for step in found.steps] for found in (a, b)]
    assert figures[0][0]["actor_grad_norm"] and figures[0][0]["reward"] is not None
    return x.keys() == y.keys() and all(torch.equal(x[name], y[name]) for name in x) and figures[0] == figures[1]


def assert_checked(found: Finished) -> None:
    assert found.rc == 0 and len(found.steps) >= STEPS, found.text[-6000:]
    for step in found.steps:
        assert step["jetrl/bit_equal_fraction"] == 1.0 and step["jetrl/logp_abs_diff_max"] == 0.0
        assert step["jetrl/audited_tokens"] == step["jetrl/tokens"] >= 16


@pytest.mark.parametrize(
    ("extra", "options"),
    [
        ([], {}),
        ([], {"stage": 3, "actors": 2}),
        (["--train.colocate_all"], {}),
        (["--algo.kl.use_loss", "--algo.kl.estimator", "k2"], {}),
    ],
    ids=["zero2", "zero3-two-ranks", "colocated", "kl-loss"],
)
def test_it_ends_with_the_same_weights(task, tmp_path, extra, options):
    expected = Finished(task, tmp_path / "recomputed", *extra, **options, **RECOMPUTE)
    found = Finished(task, tmp_path / "rollout", *extra, **options, **ROLLOUT)
    assert_checked(found)
    assert set(expected.passes) == {8} and not found.passes and same(found, expected)


def test_several_updates_end_with_the_same_weights(task, tmp_path):
    """Packed, dynamic batches, two updates an epoch: a share of the samples goes through the pass."""
    extra = ["--train.batch_size", "4", "--train.max_epochs", "2", "--ds.packing_samples"]
    expected = Finished(task, tmp_path / "recomputed", *extra, **RECOMPUTE)
    found = Finished(task, tmp_path / "rollout", *extra, JETRL_AUDIT_FRACTION="0.25", **ROLLOUT)
    assert_checked(found)
    assert set(expected.passes) == {8} and set(found.passes) == {2} and same(found, expected)


def test_one_ulp_stops_the_run_or_brings_the_pass_back(task, tmp_path):
    stopped = Finished(task, tmp_path / "stopped", ONE_ULP_IN_STEP="2", **ROLLOUT)
    assert stopped.rc != 0 and len(stopped.steps) == 1
    assert re.search(r"AuditError: log-prob of response token 0 of .*required the rollout's", stopped.text)
    expected = Finished(task, tmp_path / "recomputed", **RECOMPUTE)
    went_on = Finished(task, tmp_path / "on", ONE_ULP_IN_STEP="2", JETRL_ON_MISMATCH="recompute", **ROLLOUT)
    assert same(went_on, expected) and went_on.passes == [8] * (STEPS - 2)
    assert [step["jetrl/bit_equal_fraction"] < 1 for step in went_on.steps] == [i == 1 for i in range(STEPS)]
