"""Watch the loss scale of FP16 training: count skipped steps, and stop a run that cannot train. Imports no torch.

The framework does the scaling (torch's ``GradScaler``, DeepSpeed's ``DynamicLossScaler``):

    scale(loss).backward() → unscale → clip → a NaN or Inf gradient? skip and halve the scale : step
    after n good steps in a row: double the scale

Occasional skipped steps are how the scale adapts. A run that skips every step learns nothing, although rewards, lengths and times
look normal, so it is an error here.
"""

from __future__ import annotations

from jetrl_patch import session
from jetrl_patch.errors import UNQUANTIZED, PrecisionError

#: good steps after which the scale is doubled (Precision-RL, arXiv 2510.26788)
GROWTH_INTERVAL = 400
#: smallest useful scale: a gradient that overflows below it has another cause
SMALLEST = 1.0
#: skipped steps in a row that stop a run
PATIENCE = 20


def scales_loss() -> bool:
    """Whether this process trains with a loss scale."""
    return session.active_with(lambda config: config.mode.scales_loss)


class LossScale:
    """The loss scale and the skipped steps of an optimizer.

    Attributes:
        scale: the loss scale of the next step; None before the first.
        skipped: steps skipped since the start.
        in_a_row: steps skipped since the last good one.
    """

    def __init__(self) -> None:
        self.scale: float | None = None
        self.skipped = 0
        self.in_a_row = 0

    def note(self, *, skipped: bool, scale: float) -> None:
        """Record an optimizer step. Call it after each one.

        Args:
            skipped: whether the step was skipped because its gradients held NaN or Inf.
            scale: the loss scale of the next step.

        Raises PrecisionError if gradients overflow even at the smallest scale, or if too many steps in a row were skipped.
        """
        self.scale = scale
        if not skipped:
            self.in_a_row = 0
            return
        self.skipped += 1
        self.in_a_row += 1
        if scale < SMALLEST:
            raise at_smallest(self.in_a_row)
        if self.in_a_row >= PATIENCE:
            raise PrecisionError(
                f"FP16 training: {self.in_a_row} optimizer steps in a row were skipped because their gradients held NaN or "
                f"Inf (loss scale now {scale:g}), so nothing is learned. Check the loss and the weights for NaN, lower the "
                f"learning rate, or use {UNQUANTIZED}."
            )

    def figures(self) -> dict[str, float]:
        """``loss_scale`` and ``skipped_steps``; nothing before the first step."""
        return {} if self.scale is None else {"loss_scale": self.scale, "skipped_steps": float(self.skipped)}


def at_smallest(in_a_row: int) -> PrecisionError:
    """The error for gradients that overflow FP16 at any loss scale."""
    return PrecisionError(
        f"FP16 training: gradients held NaN or Inf at the smallest loss scale ({SMALLEST:g}), after {in_a_row} skipped steps "
        f"in a row. An activation or the loss itself is NaN or beyond FP16's range, at any loss scale. Use {UNQUANTIZED}."
    )
