"""A real pretrained model, SmolLM2-135M-Instruct: its conversion, and sums of reasoning-gym that it learns."""

from __future__ import annotations

from pathlib import Path

from examples.common.task import Task
from examples.smollm2 import task

__all__ = ["TASK"]

#: what ``warm_start`` makes of the converted model
LEARNER = Path(__file__).resolve().parents[2] / "build" / "smollm2-chain-sum"
TASK = Task(
    name=task.NAME,
    title="sums of two numbers by SmolLM2-135M",
    split=task.split,
    reward=Path(__file__).with_name("reward.py"),
    model=LEARNER,
    sizes={
        "steps": 20,
        "prompts": 10,
        "held_out": 64,
        "validate_every": 20,
        "learning_rate": 2e-5,
        "prompt_tokens": 48,
        "response_tokens": 32,
        "micro_batch": 16,
        "step_seconds": {},
    },
)
