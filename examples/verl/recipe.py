"""The recipe for verl: the command line of ``python -m verl.trainer.main_ppo``, on a CPU or a GPU."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from examples.common.recipe import Arm, Launch, environment
from examples.common.recipe import Recipe as CommonRecipe
from examples.common.tail import Follower
from examples.verl import data

#: lines of Ray, the plugin and verl -> what the run does from then on
MILESTONES = (
    ("Started a local Ray instance", "Ray runs; it asks its node for the plugin"),
    ("Ray nodes answered", "the node has the plugin; verl starts its trainer loop"),
    ("Size of train dataloader", "questions read; verl starts the trainer's worker"),
    (r"\(WorkerDict pid=\d+\).*Loading weights", "model loaded in the trainer; verl starts vLLM"),
    (r"\(vLLMHttpServer pid=", "vLLM builds its engine, then the weights are sent for the first time"),
    ("test_gen_batch meta info", "vLLM answers the held-out questions, before any training"),
    ("validation generation end", "training starts"),
)


@dataclass(frozen=True, kw_only=True)
class Recipe(CommonRecipe):
    """GRPO in verl: one update per step, FSDP2, vLLM rollout on the same device."""

    framework: ClassVar[str] = "verl"
    step_seconds: Mapping[str, float] = field(default_factory=lambda: {"avx512_bf16": 4.9, "avx2": 6.3})

    measure_routes: bool = False
    backend: str = "auto"
    gpu_memory_utilization: float = 0.3

    def launch(self, arm: Arm, folder: Path, temporary: Path, log: Path) -> Launch:
        train, held_out = data.write(folder / "data", self.task, self.held_out)
        metrics, said = temporary / "steps.jsonl", temporary / "answers"
        command = [sys.executable, "-m", "verl.trainer.main_ppo", *overrides(self, arm, train, held_out, said)]
        config = arm.config(self.device).replace(measure_routes=self.measure_routes, backend=self.backend)
        env = environment(self, temporary) | config.to_env()
        env |= {"VERL_FILE_LOGGER_PATH": str(metrics), "HYDRA_FULL_ERROR": "1"}
        return Launch(command, env, Follower(metrics, step_of), MILESTONES, lambda: answers(said))


def overrides(recipe: Recipe, arm: Arm, train: Path, held_out: Path, answers: Path) -> list[str]:
    """Hydra overrides of verl's ``ppo_trainer``: GRPO, one update per step, FSDP2, vLLM rollout on the same device.

    verl writes the model's answers at each validation into the folder ``answers``, as ``<step>.jsonl``.
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
        f"reward.custom_reward_function.path={recipe.task.reward}",
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
        f"trainer.v1.sampler.custom_sampler.path={Path(__file__).with_name('sampler.py')}",
        "trainer.v1.sampler.custom_sampler.name=PromptSampler",
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
    return shared + (_cpu() if recipe.device == "cpu" else _cuda(recipe))


def _cpu() -> list[str]:
    from jetrl_patch.adapters.cpu.verl import cpu_overrides

    return cpu_overrides()


def _cuda(recipe: Recipe) -> list[str]:
    """Overrides for one GPU with the user's own CUDA builds of torch and vLLM; flash-attn is not needed.

    vLLM compiles and captures as usual; in exact mode the plugin captures decoding.
    """
    rollout = "actor_rollout_ref.rollout"
    return [
        "trainer.n_gpus_per_node=1",
        "trainer.nnodes=1",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        "actor_rollout_ref.model.use_remove_padding=False",
        f"{rollout}.gpu_memory_utilization={recipe.gpu_memory_utilization}",
        f"{rollout}.agent.num_workers=1",
        "reward.num_workers=1",
        "data.dataloader_num_workers=0",
    ]


def step_of(line: str) -> tuple[int, dict[str, Any]]:
    """The step and the metrics in a line of verl's ``file`` logger."""
    record = json.loads(line)
    return int(record["step"]), dict(record["data"])


def answers(folder: Path, shown: int = 6) -> dict[str, Any]:
    """Held-out questions with the model's answers at the first and the last validation, and how many answers changed.

    The first are up to three questions that became right, two that became wrong and one that stayed wrong. Reads verl's
    ``<step>.jsonl``, one question per line, in an order of each file's own. Empty if there are fewer than two validations.
    """
    steps = sorted(folder.glob("*.jsonl"), key=lambda path: int(path.stem))
    if len(steps) < 2:
        return {}
    first, last = (
        {row["input"]: row for row in map(json.loads, path.read_text(encoding="utf-8").splitlines())}
        for path in (steps[0], steps[-1])
    )
    kinds: dict[tuple[bool, bool], list[dict[str, Any]]] = defaultdict(list)  # (right before, right after) -> answers
    for asked in sorted(first):
        before, after = first[asked], last[asked]
        right = before["score"] == 1.0, after["score"] == 1.0
        kinds[right].append(
            {
                "question": asked.rpartition("user\n")[2].partition("\n")[0],  # a system message may come before it
                "before": before["output"],
                "before_right": right[0],
                "after": after["output"],
                "after_right": right[1],
            }
        )
    learned, lost, wrong, kept = (kinds[key] for key in ((False, True), (True, False), (False, False), (True, True)))
    chosen = [*learned[:3], *lost[:2], *wrong[:1], *kept, *learned[3:], *wrong[1:], *lost[2:]]
    counts = {"questions": len(first), "became_right": len(learned), "became_wrong": len(lost)}
    return {"answers": chosen[:shown], "answers_changed": counts}
