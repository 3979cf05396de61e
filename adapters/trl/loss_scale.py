"""The loss scale of a half-precision run: accelerate's, on a CPU too, and watched after every step."""

from __future__ import annotations

from typing import Any

import torch
from transformers import TrainerCallback

from jetrl_patch.trainer.precision import GROWTH_INTERVAL, LossScale

# accelerate casts to 16 bits and scales the loss on GPUs only. On a CPU it would train in FP32 without a word.


class Watch(TrainerCallback):
    """Records each optimizer step, by transformers' callbacks around it. Raises PrecisionError as ``LossScale.note`` does.

    accelerate does not notice that a fused optimizer, transformers' default, has skipped a step: there the scale tells.
    """

    def __init__(self, trainer: Any, scale: LossScale) -> None:
        self._trainer, self._scale, self._before = trainer, scale, 0.0

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._before = self._now()

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        now = self._now()
        self._scale.note(skipped=self._trainer.accelerator.optimizer_step_was_skipped or now < self._before, scale=now)

    def _now(self) -> float:
        trainer = self._trainer
        return float(trainer.deepspeed.optimizer.loss_scale if trainer.deepspeed else trainer.accelerator.scaler.get_scale())


def watch(trainer: Any, scale: LossScale) -> None:
    """Have accelerate scale the loss of a trainer whose model it has not prepared yet, and ``scale`` follow it."""
    accelerator, device = trainer.accelerator, trainer.args.device
    if accelerator.scaler is not None:
        accelerator.scaler.set_growth_interval(GROWTH_INTERVAL)
    elif not trainer.is_deepspeed_enabled:  # which scales the loss itself
        accelerator.scaler = torch.amp.GradScaler(device.type, growth_interval=GROWTH_INTERVAL)
        accelerator.native_amp = True
    trainer.add_callback(Watch(trainer, scale))
