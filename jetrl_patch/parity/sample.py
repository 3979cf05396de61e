"""What the two sides return: samples from the rollout, scores from the trainer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from jetrl_patch.monitor.routes import Routes

__all__ = ["Sample", "Sampled", "Scored"]


@dataclass(frozen=True)
class Sample:
    """One request: token ids of prompt and response, and the response's log-probs as the rollout returned them.

    ``routes`` are the experts of a mixture, [tokens, layers, k] int64, of every token but the last, which the rollout never
    computed with; None if the engine did not return them. Samples are equal by the rest.
    """

    prompt: list[int]
    response: list[int]
    log_probs: list[float]
    routes: Tensor | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Sampled:
    """Samples, response tokens per second if the job asks for the cost, and how the engine ran its model."""

    samples: list[Sample]
    tokens_per_second: float | None = None
    execution: str = "eager"


@dataclass(frozen=True)
class Scored:
    """FP32 log-probs [tokens] of all responses, and tokens per second of a training step if the job asks for the cost.

    ``routes`` compares the experts that the trainer chose with the samples'; None if there are none to compare.
    """

    log_probs: Tensor
    tokens_per_second: float | None = None
    routes: Routes | None = None
