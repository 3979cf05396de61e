"""Tell the FP8 layers that their weights stay as they are from one of DeepSpeed's updates to the next."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from jetrl_patch.gate import while_config

while_training_in_fp8 = while_config(lambda config: config.fp8_train)


@while_training_in_fp8
def ppo_train(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``ActorPPOTrainer.ppo_train``: all micro-batches and updates on the samples of a step.

    Not under ZeRO-3, whose ranks free the gathered weights after each layer.
    """

    def ppo_train(self: Any, *args: Any, **kwargs: Any) -> Any:
        from jetrl_patch.fp8.unchanged import unchanged_weights

        whole = self.strategy.stage < 3
        with unchanged_weights(self.actor) if whole else contextlib.nullcontext():
            return original(self, *args, **kwargs)

    return ppo_train


@while_training_in_fp8
def optimizer_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``DeepspeedStrategy.optimizer_step``, which writes the weights, unless it only counts a micro-batch."""

    def optimizer_step(self: Any, _optimizer: Any, model: Any, _scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        from jetrl_patch.fp8.unchanged import written_weights

        with contextlib.nullcontext() if _only_counts(model) else written_weights(model):
            return original(self, _optimizer, model, _scheduler, *args, **kwargs)

    return optimizer_step


def _only_counts(model: Any) -> bool:
    """Whether DeepSpeed's ``step`` leaves the weights as they are, by what it asks itself. When in doubt it writes them."""
    engine = model if hasattr(model, "is_gradient_accumulation_boundary") else getattr(model, "model", None)
    boundary = getattr(engine, "is_gradient_accumulation_boundary", None)
    if boundary is None or getattr(engine, "zenflow", False):
        return False
    managed = getattr(engine, "managed_gradient_accumulation", None)
    return (managed is None or managed()) and not boundary()
