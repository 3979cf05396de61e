"""What the patches of one process tell each other, as far as every framework has it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from jetrl_patch.precision.loss_scale import LossScale
from jetrl_patch.trainer.guard import Followers

__all__ = ["Driver", "Worker", "reset"]


@dataclass(kw_only=True)
class Worker:
    """In a training process: the loss scale of the policy's optimizer in FP16, and models that follow the guard."""

    loss_scale: LossScale = field(default_factory=LossScale)
    followers: Followers = field(default_factory=Followers)


@dataclass(kw_only=True)
class Driver:
    """In the process of the trainer loop: figures that wait for the next line of its log."""

    metrics: dict[str, Any] = field(default_factory=dict)

    def take(self) -> dict[str, Any]:
        """The figures, each handed out once."""
        found, self.metrics = self.metrics, {}
        return found


def reset(*states: object) -> None:
    """Each as at start."""
    for state in states:
        state.__init__()  # type: ignore[misc]
