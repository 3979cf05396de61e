"""Tell the FP8 layers that their weights stay as they are from a training step's forward pass to DeepSpeed's update."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from jetrl_patch.gate import while_config

while_training_in_fp8 = while_config(lambda config: config.fp8_train)


@while_training_in_fp8
def training_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``ActorPPOTrainer.training_step``: forward, recomputation and backward of one micro-batch.

    Not under ZeRO-3, whose ranks free the gathered weights after each layer.
    """

    def training_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        from jetrl_patch.fp8.unchanged import unchanged_weights

        whole = self.strategy.stage < 3
        with unchanged_weights(self.actor) if whole else contextlib.nullcontext():
            return original(self, *args, **kwargs)

    return training_step


@while_training_in_fp8
def optimizer_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``DeepspeedStrategy.optimizer_step``, which writes weights before the training step ends."""

    def optimizer_step(self: Any, _optimizer: Any, model: Any, _scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        from jetrl_patch.fp8.unchanged import end_promise

        end_promise(model)
        return original(self, _optimizer, model, _scheduler, *args, **kwargs)

    return optimizer_step
