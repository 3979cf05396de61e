"""Importance weights that correct the mismatch between trainer and rollout, as pure functions of tensors.

The rollout samples with μ; π_old is the trainer's policy with the same weights. Legend for every function here:

    log_ratio [B, T]   Δ_t = log π_old(y_t) − log μ(y_t)        mask [B, T]   non-zero at response tokens
    ρ_t = exp(Δ_t)     ρ = ∏ρ_t over the tokens of a row        C             cap

Weights are computed in log space in float64 and detached: no gradient flows through them. Padding and rows without a token
get weight 0. Where Δ = 0 every weight is exactly 1. A NaN at a response token propagates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from jetrl_patch.correction.kinds import CORRECTIONS, interval

__all__ = ["Corrected", "correct", "ratio", "seq_ratio"]


@dataclass(frozen=True)
class Corrected:
    """What a correction does to a batch.

    Attributes:
        weights: [B, T], in the dtype of the log-ratios; 0 at padding and at dropped tokens.
        kept: bool [B, T], the response tokens that still count. A truncating correction keeps all of them.
        outside: bool [B, T], the response tokens whose ratio, or whose sequence's ratio, is outside the bounds.
    """

    weights: torch.Tensor
    kept: torch.Tensor
    outside: torch.Tensor


def ratio(log_ratio: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The uncorrected ρ_t, [B, T]; 0 at padding, at most the largest finite value of the dtype."""
    return _cast(_tokens(log_ratio, mask).exp() * mask.bool(), log_ratio.dtype)


def seq_ratio(log_ratio: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The uncorrected ρ at every token of its row, [B, T]; 0 at padding, at most the largest finite value of the dtype."""
    found = _cast(_products(log_ratio, mask).exp(), log_ratio.dtype)
    return torch.where(mask.bool(), found, 0.0)


def correct(kind: str, log_ratio: torch.Tensor, mask: torch.Tensor, bounds: Sequence[float] | None = None) -> Corrected:
    """Apply a correction. ``kinds.CORRECTIONS`` has its formula.

    Args:
        kind: the name of the correction; ``"none"`` gives weight 1 to every response token.
        log_ratio: Δ_t, [B, T].
        mask: [B, T], non-zero at response tokens.
        bounds: the cap, or low and high; None for the correction's defaults.

    Raises:
        ValueError: the shapes differ or are not [B, T].
        KeyError: there is no correction of this name.
    """
    if log_ratio.shape != mask.shape or log_ratio.dim() != 2:
        raise ValueError(
            f"Log-ratios and mask must both be [B, T], found {tuple(log_ratio.shape)} and {tuple(mask.shape)}."
        )
    if kind == "none":
        kept = mask.bool()
        return Corrected(kept.to(log_ratio.dtype), kept, torch.zeros_like(kept))
    correction, (low, high) = CORRECTIONS[kind], interval(kind, bounds)
    log = _LEVELS[correction.level](log_ratio, mask)
    if correction.truncates:
        return _truncated(log, mask, high, log_ratio.dtype)
    found = _dropped(log, mask, low, high, log_ratio.dtype)
    return _as_mask(found) if correction.level == "geometric" else found


def _tokens(log_ratio: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Δ_t in float64, [B, T]; 0 at padding."""
    return log_ratio.detach().double().masked_fill(~mask.bool(), 0.0)


def _products(log_ratio: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """ΣΔ_t of the row, at each of its tokens. [B, T]"""
    return _tokens(log_ratio, mask).sum(-1, keepdim=True).expand(log_ratio.shape)


def _means(log_ratio: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """ΣΔ_t / n of the row, at each of its tokens. [B, T]"""
    return _products(log_ratio, mask) / mask.bool().sum(-1, keepdim=True).clamp(min=1)


_LEVELS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "token": _tokens,
    "sequence": _products,
    "geometric": _means,
}


def _truncated(log: torch.Tensor, mask: torch.Tensor, cap: float, dtype: torch.dtype) -> Corrected:
    found, kept = log.exp(), mask.bool()
    weights = torch.where(kept, found.clamp(max=cap), 0.0)
    return Corrected(weights.to(dtype), kept, kept & (found > cap))


def _dropped(log: torch.Tensor, mask: torch.Tensor, low: float, high: float, dtype: torch.dtype) -> Corrected:
    found, counted = log.exp(), mask.bool()
    outside = counted & ((found < low) | (found > high))  # false for NaN, so a NaN is kept and propagates
    kept = counted & ~outside
    return Corrected(torch.where(kept, found, 0.0).to(dtype), kept, outside)


def _as_mask(found: Corrected) -> Corrected:
    """Set the weight of kept tokens to 1; NaN stays NaN."""
    ones = torch.where(found.weights.isnan(), found.weights, 1.0)
    return Corrected(torch.where(found.kept, ones, 0.0).to(found.weights.dtype), found.kept, found.outside)


def _cast(found: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return found.clamp(max=torch.finfo(dtype).max).to(dtype)
