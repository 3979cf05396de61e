"""The reward of these runs: 1 if the last ``\\boxed{…}``, or without one the last number, equals the label."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def reward_func(queries: Sequence[str], prompts: Sequence[str], labels: Sequence[str]) -> dict[str, Any]:
    """OpenRLHF's reward interface; it passes one query (prompt and response), prompt and label per call."""
    answers = [answer(query[len(prompt) :]) for query, prompt in zip(queries, prompts)]
    score = float(all(plain(found) == plain(str(label)) for found, label in zip(answers, labels)))
    return {"rewards": score, "scores": score, "extra_logs": {}}


def answer(response: str) -> str:
    """The content of the last ``\\boxed{…}``; else the last number; else an empty string."""
    found = boxed(response)
    if found is not None:
        return found
    numbers = NUMBER.findall(response)
    return numbers[-1] if numbers else ""


def boxed(text: str) -> str | None:
    """The content of the last ``\\boxed{…}``, including nested braces; None if there is none, or if it does not end."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 0, start + len("\\boxed")
    for end in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[begin + 1 : end]
    return None


def plain(text: str) -> str:
    """Remove blanks, dollar signs, thousands separators and a final period: ``$1,000.`` becomes ``1000``."""
    text = re.sub(r"[\s$]|\\[!,; ]", "", text).rstrip(".")
    return text.replace(",", "") if NUMBER.fullmatch(text) else text
