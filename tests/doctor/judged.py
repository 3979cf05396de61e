"""Launches that would start, and the doctor's checks of one, without those of the installation."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from jetrl_patch import registry
from jetrl_patch.cli.doctor.launch import check_launch, check_settings
from jetrl_patch.config import Config
from jetrl_patch.errors import JetrlError
from jetrl_patch.trainer.rules import Check, from_error
from tests.models import config_of


def furnish(path: Path) -> Path:
    """A folder with a model that looks complete, data and a reward."""
    config_of("qwen3").save_pretrained(path)
    for name in ("model.safetensors", "tokenizer.json", "train.parquet", "prompts.jsonl", "reward.py"):
        (path / name).touch()
    return path


def verl(place: Path, *extra: str, gpus: int = 2) -> list[str]:
    """Arguments of verl's trainer on what ``furnish`` made."""
    return [
        f"actor_rollout_ref.model.path={place}", "actor_rollout_ref.rollout.name=vllm", f"data.train_files={place}/train.parquet",
        f"data.val_files={place}/train.parquet", f"trainer.n_gpus_per_node={gpus}", f"+ray_kwargs.ray_init.num_gpus={gpus}",
        "algorithm.adv_estimator=grpo", *extra,
    ]  # fmt: skip


def openrlhf(place: Path, *extra: str, gpus: int = 2) -> list[str]:
    return [
        "--actor.model_name_or_path", str(place), "--vllm.num_engines", "1", "--reward.remote_url", f"{place}/reward.py",
        "--algo.advantage.estimator", "group_norm", "--rollout.n_samples_per_prompt", "4",
        "--data.prompt_dataset", f"{place}/prompts.jsonl", "--actor.num_gpus_per_node", f"{gpus}", "--ref.num_gpus_per_node",
        f"{gpus}", *extra,
    ]  # fmt: skip


def judge(framework: str, arguments: Sequence[str], config: Config, *, here: bool = True) -> list[Check]:
    """Check a launch of a framework's trainer with these arguments.

    ``here`` checks this machine's GPUs, files and models as well as the settings.
    """
    try:
        settings = registry.launches(framework).read(arguments)
    except JetrlError as error:
        return [from_error("command", error)]
    found = list(check_launch(framework, settings, config, os.environ)) if here else []
    return [*found, *check_settings(framework, settings, config)]
