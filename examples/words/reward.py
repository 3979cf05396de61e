"""The verifiable reward: 1 when the last number of the response is the answer, else 0.

verl loads this file by its path, so it imports nothing of the project.
"""

from __future__ import annotations

import re
from typing import Any

_LAST_NUMBER = re.compile(r"(?<![\d.])(-?\d+)\.?\s*$")


def final_number(text: str) -> int | None:
    """The number that ends the text (one full stop may follow it), or None: nothing else counts as an answer."""
    found = _LAST_NUMBER.search(text)
    return int(found.group(1)) if found else None


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None, **_: Any
) -> float:
    """verl's reward interface: ``solution_str`` is the decoded response, ``ground_truth`` the answer in digits."""
    return 1.0 if final_number(solution_str) == int(ground_truth) else 0.0
