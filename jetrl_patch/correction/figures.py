"""Figures on what a correction did to a batch, for a framework's logger.

The effective sample size of the weights is over tokens, or over sequences where a correction has one weight per sequence.
The other figures are over response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from jetrl_patch.correction.kinds import CORRECTIONS
from jetrl_patch.correction.weights import correct

__all__ = ["Applied", "applied", "of_run"]


@dataclass(frozen=True, kw_only=True)
class Applied:
    """Sums over one part of a batch. ``parts.merge`` combines the parts of several processes.

    Attributes:
        tokens: number of response tokens.
        outside: number of tokens whose ratio, or whose sequence's ratio, is outside the bounds.
        dropped: number of tokens that the correction drops.
        weight: sum of the weights over tokens.
        units: number of units with a weight of their own: tokens or sequences.
        unit_weight, unit_square: sums of the weights and of their squares over units.
        max_weight, min_weight: largest and smallest weight of a token.
    """

    tokens: int = 0
    outside: int = 0
    dropped: int = 0
    weight: float = 0.0
    units: int = 0
    unit_weight: float = 0.0
    unit_square: float = 0.0
    max_weight: float = -float("inf")
    min_weight: float = float("inf")

    def as_metrics(self, prefix: str = "jetrl/") -> dict[str, float]:
        """The figures for a logger. ``ess`` is 0 if every weight is 0; without a token every figure is NaN."""
        n, nan = self.tokens, float("nan")
        ess = self.unit_weight**2 / (self.units * self.unit_square) if self.unit_square else 0.0
        found = {
            "ess": ess if n else nan,
            "clipped_fraction": self.outside / n if n else nan,
            "masked_fraction": self.dropped / n if n else nan,
            "correction_weight_min": self.min_weight if n else nan,
            "correction_weight_mean": self.weight / n if n else nan,
            "correction_weight_max": self.max_weight if n else nan,
        }
        return {prefix + name: value for name, value in found.items()}


def applied(kind: str, log_ratio: torch.Tensor, mask: torch.Tensor, bounds: Sequence[float] | None = None) -> Applied:
    """Apply a correction and sum up what it does.

    Args:
        kind: a key of ``kinds.CORRECTIONS``.
        log_ratio: log π_old − log μ, [B, T].
        mask: [B, T], non-zero at response tokens.
        bounds: bounds of the correction; None for its defaults.
    """
    counted = mask.bool().cpu()
    found = correct(kind, log_ratio.detach().double().cpu(), counted, bounds)
    if not bool(counted.any()):
        return Applied()
    weights = found.weights[counted]
    units = found.weights.amax(-1)[counted.any(-1)] if CORRECTIONS[kind].weighs_sequences else weights
    return Applied(
        tokens=weights.numel(),
        outside=int(found.outside.sum()),
        dropped=int((counted & ~found.kept).sum()),
        weight=weights.sum().item(),
        units=units.numel(),
        unit_weight=units.sum().item(),
        unit_square=units.square().sum().item(),
        max_weight=weights.max().item(),
        min_weight=weights.min().item(),
    )


def of_run(correction: tuple[str, tuple[float, float]] | None, log_ratio: torch.Tensor, mask: torch.Tensor) -> Applied | None:
    """``applied`` for the correction of a run.

    Args:
        correction: (kind, interval), as an adapter reads them from the framework's settings; None if it has no name.
        log_ratio: log π_old − log μ, [B, T].
        mask: [B, T], non-zero at response tokens.

    Returns:
        The sums; None if there is no correction or it has no name.
    """
    kind, (low, high) = correction or ("none", (0.0, 0.0))
    if kind == "none":
        return None
    return applied(kind, log_ratio, mask, (high,) if CORRECTIONS[kind].truncates else (low, high))
