"""GRPO with TRL, colocated: sums in words, rollout and trainer in FP8, every token bit-equal.

``python -m examples.trl.grpo``. ``JETRL_*`` variables choose another mode.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from pathlib import Path
from typing import Any

import jetrl_patch

jetrl_patch.enable()  # the line that a script of TRL's needs

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import AutoTokenizer, TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

from examples.words import CHECKPOINT, task  # noqa: E402
from examples.words.reward import compute_score  # noqa: E402


def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """1 for the right number, else 0."""
    texts = [messages[0]["content"] for messages in completions]
    return [compute_score("words", text, right) for text, right in zip(texts, answer, strict=True)]


def rows(questions: list[task.Question]) -> Dataset:
    """TRL's columns: a prompt, and what the reward function gets."""
    return Dataset.from_list(
        [{"prompt": [{"role": "user", "content": q.text}], "answer": str(q.answer)} for q in questions]
    )


class Lines(TrainerCallback):  # type: ignore[misc]
    """Append each line of TRL's log to a file, in JSON."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": state.global_step, **logs}) + "\n")


def train(given: argparse.Namespace) -> None:
    questions, held_out = task.split(held_out=given.held_out)
    random.Random(given.seed).shuffle(questions)
    settings = GRPOConfig(
        output_dir="outputs/trl", seed=given.seed, max_steps=given.steps, learning_rate=given.learning_rate,
        per_device_train_batch_size=given.prompts * given.samples, num_generations=given.samples,
        per_device_eval_batch_size=given.held_out, num_generations_eval=1, eval_strategy="steps", eval_steps=5,
        eval_on_start=True, max_completion_length=given.response_tokens, lr_scheduler_type="constant", use_vllm=True,
        vllm_max_model_length=128, vllm_gpu_memory_utilization=0.1, logging_steps=1, save_strategy="no", report_to="none",
        disable_tqdm=True, use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=str(CHECKPOINT), reward_funcs=reward, args=settings, train_dataset=rows(questions), eval_dataset=rows(held_out),
        processing_class=AutoTokenizer.from_pretrained(CHECKPOINT), callbacks=[Lines(given.log)] if given.log else [],
    )  # fmt: skip
    trainer.train()


if __name__ == "__main__":
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--prompts", type=int, default=16, help="questions per step")
    parser.add_argument("--samples", type=int, default=8, help="answers to each")
    parser.add_argument("--held-out", type=int, default=128, help="questions per evaluation")
    parser.add_argument("--response-tokens", type=int, default=40)
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, help="a file for TRL's log, in JSON lines")
    train(parser.parse_args())
