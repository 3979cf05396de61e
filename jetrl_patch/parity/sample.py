"""A rollout sample, as the rollout passes it to the trainer."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Sample"]


@dataclass(frozen=True)
class Sample:
    """One request: token ids of prompt and response, and the response's log-probs as the rollout returned them."""

    prompt: list[int]
    response: list[int]
    log_probs: list[float]
