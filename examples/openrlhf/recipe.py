"""The recipe for OpenRLHF: the command line of ``openrlhf.cli.train_ppo_ray`` on a CPU."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from examples.common.recipe import Arm, Launch, environment
from examples.common.recipe import Recipe as CommonRecipe
from examples.common.tail import Follower
from examples.openrlhf import data
from jetrl_patch.cli.report.sources import openrlhf_step

#: lines of Ray, the plugin and OpenRLHF -> what the run does from then on
MILESTONES = (
    ("Started a local Ray instance", "Ray runs; it asks its node for the plugin"),
    ("Ray nodes answered", "the node has the plugin; OpenRLHF starts its workers"),
    (r"\(RolloutRayActor pid=", "vLLM builds its engine"),
    (r"\(PolicyModelActor pid=", "DeepSpeed prepares the policy; the first step follows"),
)


@dataclass(frozen=True, kw_only=True)
class Recipe(CommonRecipe):
    """Group-normalized advantages, one update per step, DeepSpeed, vLLM rollout.

    Attributes:
        zero_stage: of DeepSpeed.
        actors: ranks of the policy.
    """

    framework: ClassVar[str] = "openrlhf"

    zero_stage: int = 2
    actors: int = 1

    def launch(self, arm: Arm, folder: Path, temporary: Path, log: Path) -> Launch:
        train, held_out = data.write(folder / "data", self.task, self.held_out, arm.seed)
        command = [sys.executable, "-m", "jetrl_patch", "run", *switches(arm), "-m", "openrlhf.cli.train_ppo_ray"]
        command += arguments(self, arm, train, held_out, temporary)
        env = environment(self, temporary) | {"VLLM_CPU_KVCACHE_SPACE": "1"}
        return Launch(command, env, Follower(log, openrlhf_step), MILESTONES)


def switches(arm: Arm) -> list[str]:
    """The plugin's arguments."""
    if arm.precision == "fp8-unified":
        return ["--fp8-unified", *(["--align", arm.align] if arm.align else [])]
    return ["--precision", arm.precision]


def arguments(recipe: Recipe, arm: Arm, train: Path, held_out: Path, temporary: Path) -> list[str]:
    """OpenRLHF's arguments."""
    settings: dict[str, Any] = {
        "actor.model_name_or_path": recipe.model,
        "reward.remote_url": recipe.task.reward,
        "data.prompt_dataset": train,
        "data.input_key": "input",
        "data.label_key": "label",
        "data.max_samples": recipe.steps * recipe.prompts,
        "data.max_len": recipe.prompt_tokens + recipe.response_tokens,
        "eval.dataset": held_out,
        "eval.steps": recipe.validate_every,
        "eval.temperature": 0.0,
        "eval.n_samples_per_prompt": 1,
        "algo.advantage.estimator": "group_norm",
        "algo.kl.init_coef": 0.0,
        "rollout.batch_size": recipe.prompts,
        "rollout.n_samples_per_prompt": recipe.samples,
        "rollout.micro_batch_size": recipe.micro_batch // recipe.actors,
        "rollout.max_new_tokens": recipe.response_tokens,
        "train.batch_size": recipe.prompts * recipe.samples,
        "train.micro_batch_size": recipe.micro_batch // recipe.actors,
        "train.num_episodes": 1,
        "train.max_epochs": 1,
        "train.seed": arm.seed,
        "actor.num_nodes": 1,
        "actor.num_gpus_per_node": recipe.actors,
        "actor.adam.lr": recipe.learning_rate,
        "ds.zero_stage": recipe.zero_stage,
        "ds.attn_implementation": "sdpa",
        "vllm.num_engines": 1,
        "vllm.tensor_parallel_size": 1,
        "vllm.gpu_memory_utilization": 0.05,
        "ckpt.output_dir": temporary / "model",
        "ckpt.path": temporary / "checkpoints",
    }
    flags = ["data.apply_chat_template", "vllm.enforce_eager", "ckpt.disable_ds"]
    pairs = (part for name, value in settings.items() for part in (f"--{name}", str(value)))
    return [*pairs, *(f"--{flag}" for flag in flags)]
