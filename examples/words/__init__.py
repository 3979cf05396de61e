"""Sums in words: the examples' task and its small initial model."""

from __future__ import annotations

from pathlib import Path

from examples.common.task import Task
from examples.words import task

__all__ = ["CHECKPOINT", "TASK", "WORDS"]

WORDS = Path(__file__).resolve().parent
#: a dense Qwen3, trained by ``warm_start``
CHECKPOINT = WORDS / "checkpoint"
TASK = Task(name="words", title="sums in words", split=task.split, reward=WORDS / "reward.py", model=CHECKPOINT)
