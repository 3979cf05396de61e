"""Real OpenRLHF runs with ``old_log_probs="rollout"`` end with the weights of runs that compute them, bit for bit.

Two runs see the same samples because a hook of the test decides what OpenRLHF leaves to chance. Its trainer loop does not seed
torch, so each run shuffles the prompts in another order; vLLM draws tokens from one generator for all requests; and samples reach
the trainer in the order in which they are finished.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.utils import _pytree as pytree

from tests.checkpoint.test_resume import plain
from tests.openrlhf.run_openrlhf import Run, make_task

TIMEOUT = 1800
#: optimizer steps of each run; 30 were run for the pages
STEPS = int(os.environ.get("STEPS_OF_RUNS", "3"))
UNIFIED = {"JETRL_PRECISION": "fp8-unified", "CUDA_VISIBLE_DEVICES": ""}
ROLLOUT = {"JETRL_OLD_LOG_PROBS": "rollout"}
RECOMPUTE = {"JETRL_OLD_LOG_PROBS": "recompute"}
#: what a step prints of its samples and of its updates
OF_THE_STEP = ("policy_loss", "actor_grad_norm", "reward", "return", "kl", "response_length")

HOOK = """
import os, wrapt, zlib

@wrapt.when_imported("openrlhf.utils.agent")
def _(module):
    original, made = module.SingleTurnAgentExecutor.execute, {}
    async def execute(self, prompt, label, sampling_params, *args, **kwargs):
        made[prompt] = made.get(prompt, 0) + 1
        seeded = sampling_params.clone()
        seeded.seed = zlib.crc32(f"{prompt} {made[prompt]}".encode())
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

@wrapt.when_imported("torchdata.stateful_dataloader.sampler")
def _(module):
    original = module.RandomSampler.__init__
    def __init__(self, *args, **kwargs):
        import torch
        torch.manual_seed(0)  # the sampler draws its own seed here
        original(self, *args, **kwargs)
    module.RandomSampler.__init__ = __init__

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
    """A task with other prompts in every step."""
    folder = make_task(tmp_path_factory.mktemp("task"))
    rows = [{"input": f"{i % 10}+{i // 10}=", "label": "1"} for i in range(4 * STEPS)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "hook").mkdir()
    (folder / "hook" / "sitecustomize.py").write_text(HOOK)
    return folder


class Finished:
    """A run to its end: the samples of each pass of the policy, the metrics of each step, the weights and optimizer states."""

    def __init__(self, task: Path, out: Path, *extra: str, stage: int = 2, actors: int = 1, **environ: str) -> None:
        environ = {**UNIFIED, "PYTHONPATH": str(task / "hook"), **environ}
        rate = ["--actor.adam.lr", "1e-4"]
        save = ["--ckpt.output_dir", str(out / "model"), "--ckpt.path", str(out), "--ckpt.save_steps", str(STEPS)]
        options = {"steps": STEPS, "stage": stage, "actors": actors, "checkpoints": True}
        run = Run(task, *rate, *save, *extra, environ=environ, **options)
        self.rc = run.wait(TIMEOUT)
        self.text, self.out = run.text, out
        self.passes = [int(count) for count in re.findall(r"A PASS OVER (\d+) SAMPLES", self.text)]
        self.steps = run.metrics()

    def tensors(self) -> list[torch.Tensor]:
        """Every tensor of the model and of DeepSpeed's checkpoint of all ranks, which has the masters and Adam's moments."""
        assert self.rc == 0 and len(self.steps) == STEPS, self.text[-6000:]
        states = sorted((self.out / "_actor" / f"global_step{STEPS}").glob("*.pt"))
        assert any("optim_states" in file.name for file in states)
        content = [torch.load(file, weights_only=False) for file in states]
        content += [load_file(file) for file in sorted((self.out / "model").glob("*.safetensors"))]
        found = plain([leaf for leaf in pytree.tree_leaves(content) if isinstance(leaf, torch.Tensor)])
        assert len(found) > 30
        return found


def same(a: Finished, b: Finished) -> bool:
    """Whether both runs ended with the same tensors after the same steps, which had rewards to learn from."""
    x, y = a.tensors(), b.tensors()
    figures = [[[step[name] for name in OF_THE_STEP] for step in found.steps] for found in (a, b)]
    assert len({step["reward"] for step in a.steps}) > 1 < len({step["actor_grad_norm"] for step in a.steps})
    return figures[0] == figures[1] and len(x) == len(y) and all(map(torch.equal, x, y))


def assert_checked(found: Finished) -> None:
    assert found.rc == 0 and len(found.steps) == STEPS, found.text[-6000:]
    for step in found.steps:
        assert step["jetrl/bit_equal_fraction"] == 1.0 and step["jetrl/logp_abs_diff_max"] == 0.0
        assert step["jetrl/audited_tokens"] == step["jetrl/tokens"] >= 16


@pytest.mark.parametrize(
    ("extra", "options"),
    [
        ([], {}),
        ([], {"stage": 3}),
        ([], {"stage": 3, "actors": 2}),
        (["--train.colocate_all"], {}),
        (["--algo.kl.use_loss", "--algo.kl.estimator", "k2"], {}),
    ],
    ids=["zero2", "zero3", "zero3-two-ranks", "colocated", "kl-loss"],
)
def test_it_ends_with_the_same_weights(task, tmp_path, extra, options):
    expected = Finished(task, tmp_path / "recomputed", *extra, **options, **RECOMPUTE)
    found = Finished(task, tmp_path / "rollout", *extra, **options, **ROLLOUT)
    assert_checked(found)
    assert expected.passes == [8] * STEPS and not found.passes and same(found, expected)


def test_several_updates_end_with_the_same_weights(task, tmp_path):
    """Packed batches, four updates a step: a share of the samples goes through the pass."""
    extra = ["--train.batch_size", "4", "--train.max_epochs", "2", "--ds.packing_samples"]
    expected = Finished(task, tmp_path / "recomputed", *extra, **RECOMPUTE)
    found = Finished(task, tmp_path / "rollout", *extra, JETRL_AUDIT_FRACTION="0.25", **ROLLOUT)
    assert_checked(found)
    assert expected.passes == [8] * STEPS and found.passes == [4] * STEPS and same(found, expected)


def test_one_ulp_stops_the_run_or_brings_the_pass_back(task, tmp_path):
    stopped = Finished(task, tmp_path / "stopped", ONE_ULP_IN_STEP="2", **ROLLOUT)
    assert stopped.rc != 0 and len(stopped.steps) == 1
    assert re.search(r"AuditError: log-prob of response token 0 of .*required the rollout's", stopped.text)
    expected = Finished(task, tmp_path / "recomputed", **RECOMPUTE)
    went_on = Finished(task, tmp_path / "on", ONE_ULP_IN_STEP="2", JETRL_ON_MISMATCH="recompute", **ROLLOUT)
    assert same(went_on, expected) and went_on.passes == [8] * (STEPS - 2)
    assert [step["jetrl/bit_equal_fraction"] < 1 for step in went_on.steps] == [i == 1 for i in range(STEPS)]
