"""State that the patches of one process share, in every framework."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from jetrl_patch.precision.loss_scale import LossScale
from jetrl_patch.trainer.guard import Followers

__all__ = ["Driver", "Worker", "reset"]


@dataclass(kw_only=True)
class Worker:
    """State of a training process: the loss scale of the policy's optimizer, and the models that follow the guard."""

    loss_scale: LossScale = field(default_factory=LossScale)
    followers: Followers = field(default_factory=Followers)


@dataclass(kw_only=True)
class Driver:
    """State of the trainer loop: metrics that wait for its next log line."""

    metrics: dict[str, Any] = field(default_factory=dict)

    def take(self) -> dict[str, Any]:
        """Return the metrics, each once."""
        found, self.metrics = self.metrics, {}
        return found


def reset(*states: object) -> None:
    """Reset each to its initial state."""
    for state in states:
        state.__init__()  # type: ignore[misc]
