"""The loss scale of FP16 training, watched: which steps were skipped, and when a run can no longer be trained so.

The scaling itself is the framework's (torch's ``GradScaler``, DeepSpeed's ``DynamicLossScaler``):

    scale(loss).backward() → unscale → clip → a NaN or Inf gradient? skip and halve the scale : step
    after n good steps in a row: double the scale

A skipped step now and then is how the scale finds its place. What must not happen is a run in which every step is skipped
while rewards, lengths and times look alive: this is an error here.
"""

from __future__ import annotations

from jetrl_patch.errors import PrecisionError

__all__ = ["GROWTH_INTERVAL", "SMALLEST", "LossScale", "at_smallest"]

#: good steps after which the scale is doubled (Precision-RL, arXiv 2510.26788)
GROWTH_INTERVAL = 400
#: a gradient that overflows below this scale is no matter of scaling
SMALLEST = 1.0
#: skipped steps in a row after which a run stops
PATIENCE = 20


class LossScale:
    """Figures of one optimizer.

    Attributes:
        scale: the loss scale of the next step; None before the first.
        skipped: steps skipped since the start.
        in_a_row: steps skipped since the last good one.
    """

    def __init__(self, patience: int = PATIENCE) -> None:
        self.patience = patience
        self.scale: float | None = None
        self.skipped = 0
        self.in_a_row = 0

    def note(self, *, skipped: bool, scale: float) -> None:
        """After each optimizer step.

        Args:
            skipped: whether its gradients held a NaN or Inf.
            scale: of the next step.

        Raises:
            PrecisionError: a gradient that overflows even at the smallest scale; too many skipped steps in a row.
        """
        self.scale = scale
        if not skipped:
            self.in_a_row = 0
            return
        self.skipped += 1
        self.in_a_row += 1
        if scale < SMALLEST:
            raise at_smallest(self.in_a_row)
        if self.in_a_row >= self.patience:
            raise PrecisionError(
                f"FP16 training: {self.in_a_row} optimizer steps in a row were skipped because their gradients held NaN or "
                f"Inf (loss scale now {scale:g}), so nothing is learned; look at the loss and the weights for NaN, lower "
                f"the learning rate, or use precision='bf16'"
            )

    def figures(self) -> dict[str, float]:
        """``loss_scale`` and ``skipped_steps``; nothing before the first step."""
        return {} if self.scale is None else {"loss_scale": self.scale, "skipped_steps": float(self.skipped)}


def at_smallest(in_a_row: int) -> PrecisionError:
    """The error for gradients that no scale brings into FP16's range."""
    return PrecisionError(
        f"FP16 training: gradients held NaN or Inf at the smallest loss scale ({SMALLEST:g}), after {in_a_row} skipped steps "
        f"in a row; no loss scale helps against it: an activation or the loss itself is beyond FP16's range, or NaN. Use "
        f"precision='bf16'"
    )
