"""A shrunk launch: the framework reads it, its sizes are small, and every other setting is the script's."""

from __future__ import annotations

from pathlib import Path

from jetrl_patch import registry
from jetrl_patch.adapters.cpu.verl import cpu_overrides
from scripts.official import run, shrink
from scripts.official.judge import given

DATA = (Path("/data/train"), Path("/data/held_out"))
SCRIPT = [
    "algorithm.adv_estimator=rloo", "data.train_batch_size=1024", "data.max_response_length=8192", "data.truncation=left",
    "actor_rollout_ref.model.path=Qwen/Qwen3-8B", "actor_rollout_ref.model.use_remove_padding=True",
    "actor_rollout_ref.actor.ppo_mini_batch_size=256", "actor_rollout_ref.actor.use_dynamic_bsz=True",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24576", "actor_rollout_ref.actor.policy_loss.loss_mode=gspo",
    "actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.n=16", "actor_rollout_ref.rollout.temperature=0.6",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=8", "trainer.n_gpus_per_node=8", "trainer.nnodes=4",
    'trainer.logger=["console","wandb"]', "+ray_kwargs.ray_init.runtime_env.py_executable=uv run",
]  # fmt: skip


def test_verl():
    words = shrink.verl(SCRIPT, given("verl", SCRIPT), Path("/model"), DATA, shrink.Sizes(), Path("/place"))
    assert words[: len(SCRIPT)] == SCRIPT
    found = registry.launches("verl").read([word for word in words if "py_executable=uv" not in word])
    actor, rollout = found.actor_rollout_ref.actor, found.actor_rollout_ref.rollout
    assert (found.data.train_batch_size, found.data.max_response_length, rollout.n) == (8, 16, 4)
    assert actor.ppo_mini_batch_size == 4  # several updates in a step, as the script has them
    assert (rollout.tensor_model_parallel_size, found.trainer.n_gpus_per_node, found.trainer.nnodes) == (1, 1, 1)
    assert found.trainer.total_training_steps == 2 and found.trainer.logger == ["console", "file"]
    assert (found.algorithm.adv_estimator, actor.policy_loss.loss_mode, rollout.temperature) == ("rloo", "gspo", 0.6)
    assert found.data.truncation == "left" and actor.use_dynamic_bsz and actor.ppo_max_token_len_per_gpu == 8 * 48
    assert found.actor_rollout_ref.model.use_remove_padding and found.actor_rollout_ref.model.path == "/model"


def test_what_is_kept_of_a_cpus_settings():
    """Removing the padding needs no GPU in this trainer, so the script's choice stays."""
    assert {word.split("=")[0].lstrip("+") for word in cpu_overrides()} >= set(shrink._KEPT)


def test_openrlhf():
    script = [
        "--actor.model_name_or_path", "OpenRLHF/Llama-3-8b-sft-mixture", "--vllm.num_engines", "4", "--ds.zero_stage", "3",
        "--rollout.batch_size", "1024", "--rollout.n_samples_per_prompt", "8", "--train.batch_size", "128", "--vllm.enable_sleep",
        "--logger.wandb.key", "secret", "--algo.advantage.estimator", "group_norm", "--actor.eps_clip_low_high", "0.2", "0.27",
        "--data.prompt_dataset", "a/b", "--reward.model_name_or_path", "a/c", "--actor.num_gpus_per_node", "8",
        "--ds.packing_samples", "--train.dynamic_batch_enable", "--train.max_tokens_per_gpu", "16384",
    ]  # fmt: skip
    words = shrink.openrlhf(script, given("openrlhf", script), Path("/model"), DATA, shrink.Sizes(), Path("/place"))
    assert "secret" not in words and "--vllm.enable_sleep" not in words
    found = registry.launches("openrlhf").read(words)
    assert (found.rollout.batch_size, found.rollout.n_samples_per_prompt, found.train.batch_size) == (8, 4, 16)
    assert (found.actor.num_gpus_per_node, found.vllm.num_engines, found.ds.zero_stage) == (1, 1, 3)
    assert found.algo.advantage.estimator == "group_norm" and list(found.actor.eps_clip_low_high) == [0.2, 0.27]
    assert found.ds.packing_samples and found.train.max_tokens_per_gpu == 8 * 48 and found.vllm.enforce_eager


def test_a_failed_run_names_its_error():
    said = "Traceback (most recent call last):\nTypeError: f() missing 1 argument\nTraining Progress:   0%| 0/2"
    assert run.cause(said) == "TypeError: f() missing 1 argument" and run.cause("killed") == "killed"
