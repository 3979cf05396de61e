"""The verifiable reward: 1 if the response ends with the right number, else 0.

verl and OpenRLHF load this file by path, so it imports nothing from the project.
"""

from __future__ import annotations

import re
from typing import Any

_LAST_NUMBER = re.compile(r"(?<![\d.])(-?\d+)\.?\s*$")


def final_number(text: str) -> int | None:
    """The number that ends the text, optionally followed by one period; None if the text ends otherwise."""
    found = _LAST_NUMBER.search(text)
    return int(found.group(1)) if found else None


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None, **_: Any
) -> float:
    """verl's reward interface: ``solution_str`` is the decoded response, ``ground_truth`` the answer in digits."""
    return 1.0 if final_number(solution_str) == int(ground_truth) else 0.0


def reward_func(queries: list[str], prompts: list[str], labels: list[str]) -> dict[str, Any]:
    """OpenRLHF's reward interface, called with one query: the decoded prompt and response."""
    response = queries[0].rpartition("<|im_start|>assistant\n")[2].split("<|im_end|>")[0]
    score = compute_score("words", response, labels[0])
    return {"rewards": score, "scores": score, "extra_logs": {}}
