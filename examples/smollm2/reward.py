"""The verifiable reward: reasoning-gym's own scorer of ``chain_sum``, on what stands in the answer's tags.

verl and OpenRLHF load this file by path, so it imports nothing of the project; reasoning-gym is on ``PYTHONPATH``.
"""

from __future__ import annotations

from typing import Any

from reasoning_gym import get_score_answer_fn
from reasoning_gym.utils import extract_answer

_score = get_score_answer_fn("chain_sum")


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None, **_: Any
) -> float:
    """verl's reward interface: ``solution_str`` is the decoded response, ``ground_truth`` the answer in digits."""
    return float(_score(extract_answer(solution_str), {"answer": ground_truth}))


def reward_func(queries: list[str], prompts: list[str], labels: list[str]) -> dict[str, Any]:
    """OpenRLHF's reward interface, called with one query: the decoded prompt and response."""
    response = queries[0].rpartition("<|im_start|>assistant\n")[2].split("<|im_end|>")[0]
    score = compute_score("chain_sum", response, labels[0])
    return {"rewards": score, "scores": score, "extra_logs": {}}
