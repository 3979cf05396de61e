"""The verifiable reward in OpenRLHF's form. OpenRLHF loads this file by path, so it imports nothing of the project."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

_SAME = runpy.run_path(str(Path(__file__).resolve().parents[1] / "words" / "reward.py"))["compute_score"]
_START, _END = "<|im_start|>assistant\n", "<|im_end|>"


def reward_func(queries: list[str], prompts: list[str], labels: list[str]) -> dict[str, Any]:
    """1 if the response ends with the right number; called with one query, the decoded prompt and response."""
    response = queries[0].rpartition(_START)[2].split(_END)[0]
    score = float(_SAME("words", response, labels[0]))
    return {"rewards": score, "scores": score, "extra_logs": {}}
