"""Random combinations of settings: what verl's driver accepts, it completes to what it and the trainer loop accept again."""

from __future__ import annotations

import pickle
import random
from typing import Any

import pytest
from omegaconf import OmegaConf

from jetrl_patch.adapters.verl import rollout, settings
from jetrl_patch.adapters.verl.yaml_settings import ACTOR, ENGINE, MODEL, REF, ROLLOUT, selector, update
from tests.combinations import models, settings_of

_CORRECTION, _CRITIC = "algorithm.rollout_correction", "critic"
#: settings that are changed together, and their common values, or their own in a tuple
VALUES: dict[tuple[str, ...], tuple[Any, ...]] = {
    (f"{ACTOR}.strategy", f"{REF}.strategy"): ("fsdp2", "fsdp"),
    (f"{ACTOR}.fsdp_config.model_dtype",): ("bf16", "fp32"),
    (f"{ACTOR}.fsdp_config.offload_policy",): (True,),
    (f"{ACTOR}.fsdp_config.param_offload", f"{ACTOR}.fsdp_config.optimizer_offload"): (True,),
    (f"{ACTOR}.fsdp_config.reshard_after_forward",): (False,),
    (f"{ACTOR}.fsdp_config.fsdp_size",): (2,),
    (f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size",): (2,),
    (f"{ACTOR}.optim.optimizer", f"{_CRITIC}.optim.optimizer"): ("SGD", "AdamW8bit"),
    (f"{ACTOR}.policy_loss.loss_mode",): ("gspo", "geo_mean", "clip_cov", "bypass_mode"),
    (f"{ACTOR}.use_kl_loss",): (True,),
    (f"{ACTOR}.ppo_epochs",): (2,),
    (f"{ACTOR}.calculate_entropy",): (True,),
    (f"{ACTOR}.calculate_sum_pi_squared",): (True,),
    (f"{ACTOR}.checkpoint.save_contents",): (["model"], ["hf_model"]),
    (f"{MODEL}.use_remove_padding",): (False,),
    (f"{MODEL}.use_fused_kernels",): (True,),
    (f"{MODEL}.fused_kernel_options.impl_backend",): ("torch",),
    (f"{MODEL}.lora_rank", f"{MODEL}.lora_alpha"): (8,),
    (f"{MODEL}.lora.merge",): (True,),
    (f"{MODEL}.target_modules",): (["q_proj", "v_proj"],),
    (f"{MODEL}.use_liger",): (True,),
    (f"{MODEL}.enable_activation_offload",): (True,),
    (f"{ROLLOUT}.tensor_model_parallel_size",): (2,),
    (f"{ROLLOUT}.data_parallel_size",): (2,),
    (f"{ROLLOUT}.expert_parallel_size",): (2,),
    (f"{ROLLOUT}.dtype",): ("bfloat16", "auto", "float16"),
    (f"{ROLLOUT}.temperature",): (0.7,),
    (f"{ROLLOUT}.top_p",): (0.9,),
    (f"{ROLLOUT}.top_k",): (20, 0),
    (f"{ROLLOUT}.logprobs_mode",): ("raw_logprobs", "processed_logprobs"),
    (f"{ROLLOUT}.calculate_log_probs",): (True,),
    (f"{ROLLOUT}.enforce_eager",): (True,),
    (f"{ROLLOUT}.enable_rollout_routing_replay",): (True,),
    (f"{ROLLOUT}.checkpoint_engine.backend",): ("nccl",),
    (f"{ROLLOUT}.layered_summon",): (True,),
    (f"{ROLLOUT}.free_cache_engine",): (False,),
    (f"{ENGINE}.kv_cache_dtype",): ("fp8", "auto"),
    (f"{ENGINE}.max_logprobs",): (5,),
    (f"{_CORRECTION}.bypass_mode",): (True,),
    (f"{_CORRECTION}.bypass_mode", f"{_CORRECTION}.loss_type"): ((True, "reinforce"), (True, "ppo_clip")),
    (f"{_CORRECTION}.rollout_is",): ("token", "sequence"),
    (f"{_CORRECTION}.rollout_is_threshold",): (2.0, 0.5, "0.5_5.0"),
    (f"{_CORRECTION}.rollout_rs", f"{_CORRECTION}.rollout_is"): ("seq_mean_k1",),
    (f"{_CORRECTION}.rollout_rs_threshold",): ("0.999_1.001", 2.0),
    ("algorithm.adv_estimator",): ("grpo", "optimal_token_baseline"),
    ("algorithm.use_kl_in_reward",): (True,),
    ("trainer.use_v1",): (False,),
    ("trainer.resume_mode",): ("disable", "resume_path"),
    ("trainer.v1.trainer_mode",): ("colocate_async", "separate_async"),
    ("reward.reward_model.enable",): (True,),
}
#: more of the settings that `complete` reads or writes than of others
_OFTEN = tuple(paths for paths in VALUES if paths[0].startswith((_CORRECTION, f"{ACTOR}.policy_loss", f"{ROLLOUT}.dtype")))


@pytest.mark.parametrize("count", [150, pytest.param(2500, marks=pytest.mark.slow)])
def test_what_is_accepted_is_completed_to_what_is_accepted(
    base: Any, tmp_path_factory: pytest.TempPathFactory, count: int
) -> None:
    folders = models(tmp_path_factory)
    made, accepted = pickle.dumps(base()), 0
    for seed in range(count):
        draw = random.Random(seed)
        asked, found = settings_of(draw), pickle.loads(made)
        changed = {f"{MODEL}.path": str(draw.choice(folders))}
        for paths in (*draw.sample(list(VALUES), draw.randint(0, 3)), *draw.sample(_OFTEN, draw.randint(0, 2))):
            value = draw.choice(VALUES[paths])
            changed |= dict(zip(paths, value, strict=True)) if isinstance(value, tuple) else dict.fromkeys(paths, value)
        for path, value in changed.items():
            update(found, path, value)
        config = settings.chosen(found, asked).resolved()
        if any(settings.problems(found, config)):
            continue
        accepted += 1
        settings.complete(found, config)
        again = [*settings.problems(found, config), *rollout.old_log_prob_problems(selector(found), config)]
        assert not again, (seed, asked, changed, str(again[0]))
        once = OmegaConf.to_container(found)
        settings.complete(found, config)
        assert OmegaConf.to_container(found) == once, (seed, asked, changed)
    assert accepted > count / 5
