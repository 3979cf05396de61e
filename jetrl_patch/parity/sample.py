"""What the two sides return: samples from the rollout, scores from the trainer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Sample", "Sampled", "Scored"]


@dataclass(frozen=True)
class Sample:
    """One request: token ids of prompt and response, and the response's log-probs as the rollout returned them."""

    prompt: list[int]
    response: list[int]
    log_probs: list[float]


@dataclass(frozen=True)
class Sampled:
    """Samples, and response tokens per second if the job asks for the cost."""

    samples: list[Sample]
    tokens_per_second: float | None = None


@dataclass(frozen=True)
class Scored:
    """FP32 log-probs [tokens] of all responses, and tokens per second of a training step if the job asks for the cost."""

    log_probs: Tensor
    tokens_per_second: float | None = None
