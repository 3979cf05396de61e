"""GRPO with TRL, colocated: sums in words, rollout and trainer in FP8, every token bit-equal.

``python -m examples.trl.grpo [STEPS]``. ``JETRL_*`` variables choose another mode.
"""

from __future__ import annotations

import os
import random
import sys
from typing import Any

import jetrl_patch

jetrl_patch.enable()  # the line that a script of TRL's needs

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import AutoTokenizer, PrinterCallback, TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

from examples.words import CHECKPOINT, task  # noqa: E402
from examples.words.reward import compute_score  # noqa: E402

PROMPTS, GROUP = 16, 8


def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """1 for the right number, else 0."""
    texts = [messages[0]["content"] for messages in completions]
    return [compute_score("words", text, right) for text, right in zip(texts, answer, strict=True)]


class Line(TrainerCallback):  # type: ignore[misc]
    """Print one line of figures for each step."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        if "reward" in logs:
            equal, far = logs["jetrl/bit_equal_fraction"], logs["jetrl/logp_abs_diff_mean"]
            words = f"step {state.global_step:3}   reward {logs['reward']:.3f}   tokens {logs['jetrl/tokens']:5.0f}"
            print(f"{words}   bit-equal {equal:.1%}   mean |dlogp| {far:.1e} nats   {logs['step_time']:.1f} s", flush=True)


def train(steps: int) -> list[dict[str, float]]:
    """Train, and return TRL's log."""
    questions, _ = task.split()
    random.Random(0).shuffle(questions)
    rows = [{"prompt": [{"role": "user", "content": q.text}], "answer": str(q.answer)} for q in questions]
    settings = GRPOConfig(
        output_dir="outputs/trl", max_steps=steps, per_device_train_batch_size=PROMPTS * GROUP, num_generations=GROUP,
        max_completion_length=40, learning_rate=2e-4, lr_scheduler_type="constant", use_vllm=True, vllm_max_model_length=128,
        vllm_gpu_memory_utilization=0.1, logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=str(CHECKPOINT), reward_funcs=reward, args=settings, train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(CHECKPOINT), callbacks=[Line()],
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    log: list[dict[str, float]] = [line for line in trainer.state.log_history if "reward" in line]
    return log


if __name__ == "__main__":
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    found = train(int(sys.argv[1]) if len(sys.argv) > 1 else 30)
    tokens = sum(line["jetrl/tokens"] for line in found)
    equal = sum(line["jetrl/tokens"] * line["jetrl/bit_equal_fraction"] for line in found)
    print(f"{tokens:,.0f} tokens, {equal:,.0f} bit-equal. Reward {found[0]['reward']:.3f} to {found[-1]['reward']:.3f}.")
