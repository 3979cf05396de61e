"""Sums in words: the task of the examples, and the small model that starts with it."""

from __future__ import annotations

from pathlib import Path

__all__ = ["CHECKPOINT", "WORDS"]

WORDS = Path(__file__).resolve().parent
#: a dense Qwen3 that ``warm_start`` has trained
CHECKPOINT = WORDS / "checkpoint"
