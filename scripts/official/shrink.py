"""A script's own launch, shrunk to run on a CPU: a small model, small batches and lengths, one process, few steps.

The script's command line stays; the settings that shrink the run follow it and win. Only options that need a GPU are removed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from examples.words import WORDS
from jetrl_patch.adapters.cpu.verl import cpu_overrides

__all__ = ["Sizes", "openrlhf", "verl"]


@dataclass(frozen=True)
class Sizes:
    """Sizes of a shrunk run."""

    steps: int = 2
    prompts: int = 8
    samples: int = 4
    prompt_tokens: int = 32
    response_tokens: int = 16


#: settings in cpu_overrides for which the script's own values also run on a CPU
_KEPT = ("actor_rollout_ref.model.use_remove_padding",)


def verl(
    arguments: Sequence[str], given: Mapping[str, str], model: Path, data: tuple[Path, Path], sizes: Sizes, place: Path
) -> list[str]:
    """Hydra's overrides: the script's, then those that shrink the run.

    Args:
        given: the settings of ``arguments`` by name.
        data: the training file and the validation file.
        place: folder for the run's files.
    """
    actor, ref, rollout = (f"actor_rollout_ref.{part}" for part in ("actor", "ref", "rollout"))
    several = _number(given, f"{actor}.ppo_mini_batch_size", 256) < _number(given, "data.train_batch_size", 1024)
    length = sizes.prompt_tokens + sizes.response_tokens
    values = {
        "data.train_files": data[0],
        "data.val_files": data[1],
        "data.train_batch_size": sizes.prompts,
        "data.max_prompt_length": sizes.prompt_tokens,
        "data.max_response_length": sizes.response_tokens,
        "actor_rollout_ref.model.path": model,
        f"{actor}.ppo_mini_batch_size": sizes.prompts // 2 if several else sizes.prompts,
        f"{rollout}.tensor_model_parallel_size": 1,
        f"{rollout}.n": min(_number(given, f"{rollout}.n", 1), sizes.samples),
        f"{rollout}.max_model_len": length,
        f"{rollout}.max_num_batched_tokens": 512,
        f"{rollout}.max_num_seqs": 16,
        "reward.custom_reward_function.path": WORDS / "reward.py",
        "reward.custom_reward_function.name": "compute_score",
        "ray_kwargs.ray_init.runtime_env.py_executable": "null",
        "trainer.logger": '["console","file"]',
        "trainer.total_training_steps": sizes.steps,
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "trainer.save_freq": -1,
        "trainer.resume_mode": "disable",
        "trainer.default_local_dir": place / "checkpoints",
        "hydra.run.dir": ".",
        "hydra.output_subdir": "null",
    }
    for name in (f"{actor}.ppo_micro_batch_size_per_gpu", f"{rollout}.log_prob_micro_batch_size_per_gpu"):
        values[name] = 8
    values[f"{ref}.log_prob_micro_batch_size_per_gpu"] = 8
    for name in given:
        if name.endswith("max_token_len_per_gpu"):
            values[name] = 8 * length
    if given.get("algorithm.adv_estimator", "gae") == "gae":
        values |= {"critic.model.path": model, "critic.ppo_mini_batch_size": values[f"{actor}.ppo_mini_batch_size"]}
        values["critic.ppo_micro_batch_size_per_gpu"] = 8
        values["+critic.model.override_config.attn_implementation"] = "sdpa"
    kept = [word for word in cpu_overrides() if word.split("=")[0].lstrip("+") not in _KEPT]
    return [*arguments, *(f"{name}={value}" for name, value in values.items()), *kept]


def _number(given: Mapping[str, str], name: str, default: int) -> int:
    text = given.get(name, "")
    return int(text) if text.lstrip("-").isdigit() else default


#: OpenRLHF's options that need a GPU, an account, or memory that a CPU run shares -> number of their values
_DROPPED = {
    "--vllm.enable_sleep": 0,
    "--ds.enable_sleep": 0,
    "--ds.adam_offload": 0,
    "--logger.wandb.key": 1,
    "--logger.tensorboard_dir": 1,
    "--ckpt.load_enable": 0,
    "--ckpt.save_hf": 0,
    "--reward.model_name_or_path": 1,
    "--train.agent_func_path": 1,
}


def openrlhf(
    arguments: Sequence[str], given: Mapping[str, str], model: Path, data: tuple[Path, Path], sizes: Sizes, place: Path
) -> list[str]:
    """OpenRLHF's arguments: the script's without those of ``_DROPPED``, then those that shrink the run."""
    rest: list[str] = []
    skip = 0
    for word in arguments:
        if skip:
            skip -= 1
        elif word in _DROPPED:
            skip = _DROPPED[word]
        else:
            rest.append(word)
    samples = min(_number(given, "rollout.n_samples_per_prompt", 1), sizes.samples)
    several = _number(given, "train.batch_size", 128) < _number(given, "rollout.batch_size", 1024) * samples
    values = {
        "actor.model_name_or_path": model,
        "reward.remote_url": WORDS / "reward.py",
        "data.prompt_dataset": data[0],
        "data.input_key": "input",
        "data.label_key": "label",
        "data.max_samples": sizes.steps * sizes.prompts,
        "data.max_len": sizes.prompt_tokens + sizes.response_tokens,
        "rollout.max_new_tokens": sizes.response_tokens,
        "rollout.batch_size": sizes.prompts,
        "rollout.n_samples_per_prompt": samples,
        "rollout.micro_batch_size": 8,
        "train.batch_size": sizes.prompts * samples // (2 if several else 1),
        "train.micro_batch_size": 8,
        "train.num_episodes": 1,
        "train.max_epochs": 1,
        "eval.steps": -1,
        "vllm.num_engines": 1,
        "vllm.tensor_parallel_size": 1,
        "vllm.gpu_memory_utilization": 0.05,
        "ds.attn_implementation": "sdpa",
        "ds.ring_attn_size": 1,
        "ckpt.output_dir": place / "model",
        "ckpt.path": place / "checkpoints",
        "ckpt.save_steps": -1,
    }
    values |= {
        name: 8 * (sizes.prompt_tokens + sizes.response_tokens) for name in given if name.endswith("max_tokens_per_gpu")
    }
    values |= {name: 1 for name in given if name.endswith(("num_nodes", "num_gpus_per_node"))}
    words = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    return [*rest, *words, *(flag for flag in ("--vllm.enforce_eager", "--ckpt.disable_ds") if flag not in rest)]
