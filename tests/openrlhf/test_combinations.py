"""Random combinations of settings: what OpenRLHF's driver accepts, it completes to what it accepts again."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest

from jetrl_patch.adapters.openrlhf import launch, settings
from tests.combinations import models, settings_of

_CORRECTION = "algo.advantage.is_correction_"
#: arguments -> values
VALUES: dict[str, tuple[Any, ...]] = {
    "ds.zero_stage": (1, 3),
    "ds.param_dtype": ("fp16",),
    "ds.grad_accum_dtype": ("fp32",),
    "ds.adam_offload": (True,),
    "ds.lora.rank": (8,),
    "ds.lora.target_modules": (["q_proj"],),
    "ds.packing_samples": (True,),
    "ds.ring_attn_size": (2,),
    "ds.use_liger_kernel": (True,),
    "actor.optim": ("muon",),
    "actor.policy_loss_type": ("gspo",),
    "actor.gradient_checkpointing_enable": (True,),
    "actor.eps_clip": (0.1,),
    "vllm.tensor_parallel_size": (2,),
    "vllm.enforce_eager": (True,),
    "vllm.enable_sleep": (True,),
    "vllm.enable_prefix_caching": (True,),
    "rollout.temperature": (0.7, 0.0),
    "rollout.top_p": (0.9,),
    "rollout.n_samples_per_prompt": (4,),
    "train.async_enable": (True,),
    "train.partial_rollout_enable": (True,),
    "train.colocate_all": (True,),
    "train.enable_ema": (True,),
    "train.max_epochs": (2,),
    "train.dynamic_batch_enable": (True,),
    "algo.kl.init_coef": (0.0, 1e-3),
    "algo.kl.use_loss": (True,),
    "algo.advantage.estimator": ("reinforce", "group_norm", "gae"),
    f"{_CORRECTION}level": ("token", "seq"),
    f"{_CORRECTION}mode": ("clip",),
    f"{_CORRECTION}gating": ("tv",),
    f"{_CORRECTION}threshold": ([0.0, 2.0], [0.5, 5.0], [0.2, 0.9]),
}
_OFTEN = [name for name in VALUES if name.startswith((_CORRECTION, "actor.policy"))]


@pytest.mark.parametrize("count", [300, pytest.param(2500, marks=pytest.mark.slow)])
def test_what_is_accepted_is_completed_to_what_is_accepted(tmp_path_factory: pytest.TempPathFactory, count: int) -> None:
    folders = models(tmp_path_factory)
    words = ["--actor.model_name_or_path", "model", "--reward.remote_url", "reward.py", "--data.prompt_dataset", "data"]
    made, accepted = launch.read([*words, "--vllm.num_engines", "1", "--vllm.sync_backend", "gloo"]), 0
    for seed in range(count):
        draw = random.Random(seed)
        asked, args = settings_of(draw), copy.deepcopy(made)
        changed = {"actor.model_name_or_path": str(draw.choice(folders))}
        for name in (*draw.sample(list(VALUES), draw.randint(0, 3)), *draw.sample(_OFTEN, draw.randint(0, 2))):
            changed[name] = draw.choice(VALUES[name])
        for path, value in changed.items():
            owner, _, name = path.rpartition(".")
            node = args
            for part in owner.split("."):
                node = getattr(node, part)
            assert hasattr(node, name), path
            setattr(node, name, value)
        config = settings.chosen(args, asked).resolved()
        if any(settings.problems(args, config)):
            continue
        accepted += 1
        settings.complete(args, config)
        again = [*settings.problems(args, config)]
        assert not again, (seed, asked, changed, str(again[0]))
        once = copy.deepcopy(args)
        settings.complete(args, config)
        assert args == once, (seed, asked, changed)
    assert accepted > count / 5
