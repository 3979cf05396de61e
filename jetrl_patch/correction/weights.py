"""Importance weights against the mismatch between trainer and rollout, as pure functions of tensors.

The rollout sampled with μ, the trainer's weights of the same moment define π_old. Legend, as in every function here:

    log_ratio [B, T]   Δ_t = log π_old(y_t) − log μ(y_t)        mask [B, T]   non-zero at response tokens
    ρ_t = exp(Δ_t)     ρ = ∏ρ_t over the tokens of a row        C             cap

Everything is computed in log space in float64 and detached: a weight changes the measure, not the objective. Padding
and rows without a token get weight 0. Where Δ = 0 every weight is exactly 1. A NaN at a response token stays visible.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from jetrl_patch.correction.kinds import interval

__all__ = ["Corrected", "correct", "geo_mis", "icepop", "mis", "ratio", "seq_mis", "seq_ratio", "seq_tis", "tis"]


@dataclass(frozen=True)
class Corrected:
    """What a correction does to a batch.

    Attributes:
        weights: [B, T], in the dtype of the log-ratios; 0 at padding and at what is dropped.
        kept: bool [B, T]; response tokens that still count. A truncating correction keeps all of them.
        outside: bool [B, T]; response tokens whose ratio (or whose sequence's) lies outside the bounds.
    """

    weights: torch.Tensor
    kept: torch.Tensor
    outside: torch.Tensor


def tis(log_ratio: torch.Tensor, mask: torch.Tensor, cap: float) -> Corrected:
    """min(ρ_t, C), token-level truncated importance sampling (FlashRL's blog; "Token-TIS" in arXiv 2510.26788)."""
    return _truncated(_tokens(log_ratio, mask), mask, cap, log_ratio.dtype)


def seq_tis(log_ratio: torch.Tensor, mask: torch.Tensor, cap: float) -> Corrected:
    """min(ρ, C) for every token of a row ("Seq-TIS", Precision-RL, arXiv 2510.26788, §2)."""
    return _truncated(_products(log_ratio, mask), mask, cap, log_ratio.dtype)


def mis(log_ratio: torch.Tensor, mask: torch.Tensor, low: float, high: float) -> Corrected:
    """ρ_t·1{low ≤ ρ_t ≤ C}, token-level masked importance sampling; low = 0 is the plain form."""
    return _dropped(_tokens(log_ratio, mask), mask, low, high, log_ratio.dtype)


def icepop(log_ratio: torch.Tensor, mask: torch.Tensor, low: float, high: float) -> Corrected:
    """ρ_t·1{α ≤ ρ_t ≤ β} (IcePop, arXiv 2510.18855): tokens outside on either side get no gradient."""
    return mis(log_ratio, mask, low, high)


def seq_mis(log_ratio: torch.Tensor, mask: torch.Tensor, low: float, high: float) -> Corrected:
    """ρ·1{low ≤ ρ ≤ C} for every token of a row ("Seq-MIS", arXiv 2510.26788, §2; there low = 0)."""
    return _dropped(_products(log_ratio, mask), mask, low, high, log_ratio.dtype)


def geo_mis(log_ratio: torch.Tensor, mask: torch.Tensor, low: float, high: float) -> Corrected:
    """1{low ≤ (∏ρ_t)^(1/n) ≤ high} for every token of a row with n tokens: kept with weight 1, or dropped.

    "Geometric" rejection of Liu, Li et al., When Speed Kills Stability (https://richardli.xyz/rl-collapse).
    """
    found = _dropped(_means(log_ratio, mask), mask, low, high, log_ratio.dtype)
    nan = torch.where(found.weights.isnan(), found.weights, 1.0)
    return Corrected(torch.where(found.kept, nan, 0.0).to(log_ratio.dtype), found.kept, found.outside)


def ratio(log_ratio: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """ρ_t as it is, 0 at padding; at most the largest finite value of the dtype. [B, T]"""
    return _cast(_tokens(log_ratio, mask).exp() * mask.bool(), log_ratio.dtype)


def seq_ratio(log_ratio: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """ρ as it is at every token of a row, 0 at padding; at most the largest finite value of the dtype. [B, T]"""
    found = _cast(_products(log_ratio, mask).exp(), log_ratio.dtype)
    return torch.where(mask.bool(), found, 0.0)


_CAPPED: dict[str, Callable[[torch.Tensor, torch.Tensor, float], Corrected]] = {"tis": tis, "seq-tis": seq_tis}
_BOUNDED: dict[str, Callable[[torch.Tensor, torch.Tensor, float, float], Corrected]] = {
    "mis": mis,
    "icepop": icepop,
    "seq-mis": seq_mis,
    "geo-mis": geo_mis,
}


def correct(kind: str, log_ratio: torch.Tensor, mask: torch.Tensor, bounds: Sequence[float] | None = None) -> Corrected:
    """The correction of a name (``kinds.KINDS``) with the given bounds or its default ones.

    ``"none"`` gives weight 1 to every response token. Raises ValueError if the shapes differ, KeyError for another name.
    """
    if log_ratio.shape != mask.shape or log_ratio.dim() != 2:
        raise ValueError(
            f"log-ratios and mask must be [B, T] both, found {tuple(log_ratio.shape)} and {tuple(mask.shape)}"
        )
    if kind == "none":
        kept = mask.bool()
        return Corrected(kept.to(log_ratio.dtype), kept, torch.zeros_like(kept))
    low, high = interval(kind, bounds)
    if kind in _CAPPED:
        return _CAPPED[kind](log_ratio, mask, high)
    return _BOUNDED[kind](log_ratio, mask, low, high)


def _tokens(log_ratio: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Δ_t in float64, 0 at padding. [B, T]"""
    return log_ratio.detach().double().masked_fill(~mask.bool(), 0.0)


def _products(log_ratio: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """ΣΔ_t of its row at every token. [B, T]"""
    return _tokens(log_ratio, mask).sum(-1, keepdim=True).expand(log_ratio.shape)


def _means(log_ratio: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """ΣΔ_t / n of its row at every token. [B, T]"""
    return _products(log_ratio, mask) / mask.bool().sum(-1, keepdim=True).clamp(min=1)


def _truncated(log: torch.Tensor, mask: torch.Tensor, cap: float, dtype: torch.dtype) -> Corrected:
    found, kept = log.exp(), mask.bool()
    weights = torch.where(kept, found.clamp(max=cap), 0.0)
    return Corrected(weights.to(dtype), kept, kept & (found > cap))


def _dropped(log: torch.Tensor, mask: torch.Tensor, low: float, high: float, dtype: torch.dtype) -> Corrected:
    found, counted = log.exp(), mask.bool()
    outside = counted & ((found < low) | (found > high))  # a NaN lies nowhere, so it is kept and seen
    kept = counted & ~outside
    return Corrected(torch.where(kept, found, 0.0).to(dtype), kept, outside)


def _cast(found: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return found.clamp(max=torch.finfo(dtype).max).to(dtype)
