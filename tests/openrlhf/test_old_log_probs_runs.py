"""Real OpenRLHF runs with ``old_log_probs="rollout"`` end with the weights of runs that compute them, bit for bit.

Two runs see the same samples because a hook of the test decides what OpenRLHF leaves to chance. Its trainer loop does not seed
torch, so each run shuffles the prompts in another order; vLLM draws tokens from one generator for all requests; and samples reach
the trainer in the order in which they are finished.
"""

from __future__ import annotations

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
import wrapt, zlib

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
    original = module.SamplesGenerator._generate_vllm
    def _generate_vllm(self, *args, **kwargs):
        found, *others = original(self, *args, **kwargs)
        found.sort(key=lambda experience: (experience.prompts[0], experience.sequences[0].tolist()))
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
    folder = make_task(tmp_path_factory.mktemp("task"), prompts=4 * STEPS)
    (folder / "hook").mkdir()
    (folder / "hook" / "sitecustomize.py").write_text(HOOK)
    return folder


class Finished:
    """A run to its end: the samples of each pass of the policy, the metrics of each step, the weights and optimizer states."""

    def __init__(self, task: Path, out: Path, stage: int, **environ: str) -> None:
        environ = {**UNIFIED, "PYTHONPATH": str(task / "hook"), **environ}
        rate = ["--actor.adam.lr", "1e-4"]
        save = ["--ckpt.output_dir", str(out / "model"), "--ckpt.path", str(out), "--ckpt.save_steps", str(STEPS)]
        run = Run(task, *rate, *save, environ=environ, steps=STEPS, stage=stage, checkpoints=True)
        self.rc = run.wait(TIMEOUT)
        self.text, self.failure, self.out = run.text, run.failure, out
        self.passes = [int(count) for count in re.findall(r"A PASS OVER (\d+) SAMPLES", self.text)]
        self.steps = run.metrics()

    def tensors(self) -> list[torch.Tensor]:
        """Every tensor of the model and of DeepSpeed's checkpoint of all ranks, which has the masters and Adam's moments."""
        assert self.rc == 0 and len(self.steps) == STEPS, self.failure
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
    assert found.rc == 0 and len(found.steps) == STEPS, found.failure
    for step in found.steps:
        assert step["jetrl/bit_equal_fraction"] == 1.0 and step["jetrl/logp_abs_diff_max"] == 0.0
        assert step["jetrl/audited_tokens"] == step["jetrl/tokens"] >= 16


@pytest.mark.parametrize("stage", [2, 3], ids=["zero2", "zero3"])
def test_it_ends_with_the_same_weights(task, tmp_path, stage):
    expected = Finished(task, tmp_path / "recomputed", stage=stage, **RECOMPUTE)
    found = Finished(task, tmp_path / "rollout", stage=stage, **ROLLOUT)
    assert_checked(found)
    assert expected.passes == [8] * STEPS and not found.passes and same(found, expected)
