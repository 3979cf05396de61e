"""The patches of OpenRLHF reach Ray's workers and are undone, and the CPU still needs its shims."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from jetrl_patch.adapters.openrlhf import metrics, startup
from jetrl_patch.adapters.openrlhf.patches import PATCHES
from jetrl_patch.config import Config
from jetrl_patch.errors import ConflictError, NotPatchedError
from tests.patches import applied

EXACT = Config(precision="fp8-unified").resolved()


def python(code: str) -> str:
    environ = {k: v for k, v in os.environ.items() if not k.startswith("JETRL_")} | {"DS_ACCELERATOR": "cpu"}
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, env=environ, timeout=500
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout


def test_a_packed_row_tells_attention_how_many_sequences_it_has():
    python(
        """
        import jetrl_patch
        jetrl_patch.enable(precision="fp8-unified", platform="cpu")
        import torch
        from openrlhf.models.actor import Actor
        from jetrl_patch.exact.sequences import bound
        class Model(torch.nn.Module):
            def forward(self, sequences, attention_mask, position_ids):
                self.bound = bound(position_ids)
                return {"logits": torch.zeros(*sequences.shape, 12)}
        actor, mask = Actor(Model()), torch.ones(3, 7, dtype=torch.int64)
        mask[0, 5:] = mask[2, 3:] = 0
        actor.packing_samples, actor.temperature = True, 1.0
        actor(torch.ones(3, 7, dtype=torch.int64), mask[:, 1:], mask)
        assert actor.model.bound == 3
        """
    )


@pytest.mark.e2e
def test_actors_use_the_patched_methods_and_disable_gives_back_the_originals():
    """Ray pickles a class under ``@ray.remote`` by value; the worker looks up only the names that it uses."""
    out = python(
        """
        import jetrl_patch
        jetrl_patch.enable(precision="fp8-unified", platform="cpu")
        import ray.cloudpickle, torch
        from openrlhf.trainer import ppo_trainer, ppo_trainer_async
        from openrlhf.trainer.ray import launcher, ppo_actor, vllm_worker_wrap
        from openrlhf.models import actor
        def exported(remote):
            return remote.__ray_metadata__.modified_class
        base, worker = ppo_trainer.BasePPOTrainer, launcher.BaseModelActor
        for name in ("train_step", "broadcast_to_vllm"):
            assert getattr(exported(ppo_trainer.PPOTrainer), name) is getattr(base, name), name
        for remote in (launcher.ReferenceModelActor, launcher.RewardModelActor):
            assert exported(remote)._setup_distributed is worker._setup_distributed
            assert exported(remote).jetrl_report is worker.jetrl_report
        copy = ray.cloudpickle.dumps(exported(ppo_trainer.PPOTrainer))
        assert b"timing/make_experience" not in copy  # the body of train_step, which is pickled by name
        assert torch.cuda.current_device() == "cpu" and torch.device(f"cuda:{torch.cuda.current_device()}").index == 0
        states = {p.target: p.state for p in jetrl_patch.status().patches if "openrlhf" in p.target}
        waiting = [target for target, state in states.items() if state == "waiting" and "samples_generator" not in target]
        print(len(states), waiting)
        jetrl_patch.disable()
        assert base.train_step.__module__ == "openrlhf.trainer.ppo_trainer"
        assert not hasattr(base.train_step, "__wrapped__") and not hasattr(actor.Actor.__init__, "__wrapped__")
        assert not hasattr(vllm_worker_wrap.WorkerWrap.update_weight, "__wrapped__")
        assert not hasattr(worker, "jetrl_report") and not hasattr(exported(launcher.ReferenceModelActor), "jetrl_report")
        assert exported(ppo_trainer.PPOTrainer).train_step.__qualname__ == "BasePPOTrainer.train_step"
        assert torch.cuda.current_device.__module__.startswith("torch")
        """
    )
    count, waiting = out.strip().splitlines()[-1].split(maxsplit=1)  # libraries print earlier lines
    assert int(count) > 20 and waiting.strip() == "[]"


def test_still_needed_openrlhf_imports_flash_attn_without_condition():
    run = subprocess.run(
        [sys.executable, "-c", "import openrlhf.models.ring_attn_utils"], capture_output=True, text=True, timeout=500
    )
    assert run.returncode != 0 and "flash_attn" in run.stderr


def report(**changes):
    return {"role": "reference actor", "pid": 7, "node": "n1", "config": EXACT.to_env(), "layers": 21} | changes


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"config": {}}, NotPatchedError, r"the reference actor \(pid 7 on n1\) is not patched"),
        ({"layers": 0}, NotPatchedError, "built its model before it was patched"),
        ({"config": Config(precision="bf16").to_env()}, ConflictError, "settings of the reference actor"),
    ],
)
def test_an_actor_that_stands_otherwise_stops_the_run(changes, error, says):
    startup.check_report(report(), EXACT)
    with pytest.raises(error, match=says):
        startup.check_report(report(**changes), EXACT)


def test_log_probs_are_asked_for_when_no_correction_does(monkeypatch):
    from jetrl_patch import session

    made = applied(metrics.sampling_params, PATCHES, lambda **kwargs: kwargs)
    assert made(logprobs=None, min_tokens=1) == {"logprobs": None, "min_tokens": 1}
    monkeypatch.setattr(session, "is_active", lambda: True)
    monkeypatch.setattr(session, "active_config", lambda: EXACT)
    assert made(logprobs=None, min_tokens=1)["logprobs"] == 0 and made(logprobs=1)["logprobs"] == 1
    engines = metrics.create_vllm_engines(lambda n, logprobs_mode=None, *, other=0: (n, logprobs_mode, other))
    assert (
        engines(2, other=5) == (2, "processed_logprobs", 5)
        and engines(2, "processed_logprobs")[1] == "processed_logprobs"
    )
