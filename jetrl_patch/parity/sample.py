"""What the rollout hands to the trainer: tokens and the log-probs they were sampled with."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Sample"]


@dataclass(frozen=True)
class Sample:
    """One request: prompt and response as token ids, and the response's log-probs as the rollout returned them."""

    prompt: list[int]
    response: list[int]
    log_probs: list[float]
