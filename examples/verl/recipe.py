"""The recipe: what ``python -m verl.trainer.main_ppo`` is called with, on a CPU and on a GPU."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jetrl_patch import Config

WORDS = Path(__file__).resolve().parents[1] / "words"
Device = Literal["cpu", "cuda"]


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to run: a precision, how far the two sides are aligned (None: the default), and a seed."""

    precision: str
    align: str | None = None
    seed: int = 0

    def config(self, device: Device) -> Config:
        """The plugin's settings. Raises ConfigError for a combination that means nothing."""
        settings: dict[str, Any] = {"precision": self.precision, "align": self.align, "platform": device}
        return Config(**settings)

    @property
    def resolved_align(self) -> str:
        return str(self.config("cpu").resolved_align)

    @property
    def exact(self) -> bool:
        """Whether equality to the last bit is promised."""
        return bool(self.config("cpu").exact)

    @property
    def name(self) -> str:
        """``fp8-unified/exact, seed 0``."""
        align = "" if self.resolved_align == "none" else f"/{self.resolved_align}"
        return f"{self.precision}{align}, seed {self.seed}"

    @property
    def slug(self) -> str:
        """The same as the name of a folder."""
        return self.name.replace("/", "-").replace(", ", "-").replace(" ", "")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Sizes of one run. ``prompts`` questions a step, ``samples`` answers each; ``held_out`` questions per validation."""

    model: Path = WORDS / "checkpoint"
    steps: int = 30
    prompts: int = 16
    samples: int = 8
    learning_rate: float = 2e-4
    held_out: int = 512
    validate_every: int = 5
    prompt_tokens: int = 24
    response_tokens: int = 40
    micro_batch: int = 64
    device: Device = "cpu"


def overrides(recipe: Recipe, arm: Arm, train: Path, held_out: Path, answers: Path) -> list[str]:
    """Hydra overrides of verl's ``ppo_trainer``: GRPO, one update a step, FSDP2, vLLM rollout on the same device.

    ``answers`` is the folder in which verl puts what the model said at each validation, as ``<step>.jsonl``.
    """
    actor, ref, rollout = (f"actor_rollout_ref.{part}" for part in ("actor", "ref", "rollout"))
    length = recipe.prompt_tokens + recipe.response_tokens
    sequences = recipe.prompts * recipe.samples
    shared = [
        "algorithm.adv_estimator=grpo",
        f"data.train_files={train}",
        f"data.val_files={held_out}",
        f"data.train_batch_size={recipe.prompts}",
        f"data.max_prompt_length={recipe.prompt_tokens}",
        f"data.max_response_length={recipe.response_tokens}",
        f"data.seed={arm.seed}",
        f"reward.custom_reward_function.path={WORDS / 'reward.py'}",
        "reward.custom_reward_function.name=compute_score",
        f"actor_rollout_ref.model.path={recipe.model}",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        f"{actor}.strategy=fsdp2",
        f"{actor}.fsdp_config.strategy=fsdp2",
        f"{ref}.fsdp_config.strategy=fsdp2",
        f"{actor}.fsdp_config.seed={arm.seed}",
        f"{actor}.optim.lr={recipe.learning_rate}",
        f"{actor}.optim.lr_scheduler_type=cosine",
        f"{actor}.optim.min_lr_ratio=0.05",
        f"{actor}.ppo_mini_batch_size={recipe.prompts}",
        f"{actor}.ppo_micro_batch_size_per_gpu={recipe.micro_batch}",
        f"{rollout}.name=vllm",
        f"{rollout}.n={recipe.samples}",
        f"{rollout}.seed={arm.seed}",
        f"{rollout}.tensor_model_parallel_size=1",
        f"{rollout}.calculate_log_probs=True",
        f"{rollout}.log_prob_micro_batch_size_per_gpu={recipe.micro_batch}",
        f"{ref}.log_prob_micro_batch_size_per_gpu={recipe.micro_batch}",
        f"{rollout}.max_model_len={length}",
        f"{rollout}.max_num_batched_tokens={max(2048, length)}",
        f"{rollout}.max_num_seqs={min(sequences, 256)}",
        "trainer.use_v1=False",
        'trainer.logger=["console","file"]',
        f"trainer.total_training_steps={recipe.steps}",
        "trainer.total_epochs=1000",
        "trainer.val_before_train=True",
        f"trainer.test_freq={recipe.validate_every}",
        f"trainer.validation_data_dir={answers}",
        "trainer.save_freq=-1",
        "trainer.resume_mode=disable",
        "trainer.project_name=jetrl_patch",
        f"trainer.experiment_name={arm.slug}",
        "hydra.run.dir=.",
        "hydra.output_subdir=null",
    ]
    return shared + (_cpu() if recipe.device == "cpu" else _cuda())


def _cpu() -> list[str]:
    from jetrl_patch.adapters.cpu.verl_overrides import cpu_overrides

    return cpu_overrides()


def _cuda() -> list[str]:
    """One GPU, with the user's own CUDA builds of torch and vLLM; nothing here needs flash attention."""
    rollout = "actor_rollout_ref.rollout"
    return [
        "trainer.n_gpus_per_node=1",
        "trainer.nnodes=1",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        "actor_rollout_ref.model.use_remove_padding=False",
        f"{rollout}.gpu_memory_utilization=0.3",
        f"{rollout}.enforce_eager=True",
        f"{rollout}.agent.num_workers=1",
        "reward.num_workers=1",
        "data.dataloader_num_workers=0",
    ]


def command(recipe: Recipe, arm: Arm, train: Path, held_out: Path, answers: Path) -> list[str]:
    """The whole command line, with this process's Python."""
    return [sys.executable, "-m", "verl.trainer.main_ppo", *overrides(recipe, arm, train, held_out, answers)]


def environment(recipe: Recipe, arm: Arm, metrics: Path, temporary: Path) -> dict[str, str]:
    """The environment of the run: this process's own, the plugin's settings, and quiet, self-contained neighbours.

    Args:
        metrics: where verl's ``file`` logger writes one JSON line a step.
        temporary: a folder with a short path (Ray puts sockets there) that holds all that the run leaves behind.
    """
    env = dict(os.environ)
    env.pop("RAY_ADDRESS", None)  # a cluster of its own, never one that happens to run
    env.update(arm.config(recipe.device).to_env())
    env.update(
        VERL_FILE_LOGGER_PATH=str(metrics),
        TMPDIR=str(temporary),
        RAY_TMPDIR=str(temporary),
        RAY_DEDUP_LOGS="0",
        RAY_USAGE_STATS_ENABLED="0",
        RAY_memory_monitor_refresh_ms="0",
        HF_HUB_OFFLINE="1",
        TOKENIZERS_PARALLELISM="false",
        WANDB_MODE="disabled",
        HYDRA_FULL_ERROR="1",
        VLLM_NO_USAGE_STATS="1",
        PYTHONUNBUFFERED="1",
    )
    if recipe.device == "cpu":
        env.pop("VLLM_CPU_KVCACHE_SPACE", None)  # with it, vLLM ignores kv_cache_memory_bytes
        env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        # One thread: trainer, engine and Ray's own processes share few cores, and threads that spin for each other lose.
        env.setdefault("OMP_NUM_THREADS", "1")
    return env
