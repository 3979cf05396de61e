"""What a correction did to a batch, for a framework's log.

The weights' effective sample size counts what has a weight of its own: tokens, or sequences where a correction has one
weight for a sequence. The other figures are over response tokens.
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
    """Sums over one part of a batch; parts of several processes are put together by ``parts.merge``.

    Attributes:
        tokens: response tokens.
        outside: of these, those whose ratio (or whose sequence's) lies outside the bounds.
        dropped: of these, those that the correction takes out.
        weight: sum of the weights over tokens.
        units: what has a weight of its own: tokens or sequences.
        unit_weight, unit_square: sums of the weights and of their squares over units.
        max_weight, min_weight: over tokens.
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
        """``ess`` is 0 where every weight is 0; NaN everywhere without a token."""
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
    """Apply a correction to log-ratios [B, T] and sum up what it does.

    Args:
        kind: one of ``kinds.CORRECTIONS``.
        mask: [B, T], non-zero at response tokens.
        bounds: of the correction; None for its default ones.
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
    """What a run's correction does to log-ratios [B, T].

    Args:
        correction: kind and interval as an adapter reads them off its framework's settings; None for one without a name.

    Returns:
        None where there is no correction, or one without a name.
    """
    kind, (low, high) = correction or ("none", (0.0, 0.0))
    if kind == "none":
        return None
    return applied(kind, log_ratio, mask, (high,) if CORRECTIONS[kind].truncates else (low, high))
