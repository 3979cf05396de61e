"""Corrections as pure functions of tensors: importance weights, and objectives that need more than weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from jetrl_patch.config.corrections import CORRECTIONS, interval

# ---- Importance weights that correct the mismatch between trainer and rollout --------------------
# The rollout samples with μ; π_old is the trainer's policy with the same weights. Legend for every function here:
#
#     log_ratio [B, T]   Δ_t = log π_old(y_t) − log μ(y_t)        mask [B, T]   non-zero at response tokens
#     ρ_t = exp(Δ_t)     ρ = ∏ρ_t over the tokens of a row        C             cap
#
# Weights are computed in log space in float64 and detached: no gradient flows through them. Padding and rows without a token
# get weight 0. Where Δ = 0 every weight is exactly 1. A NaN at a response token propagates.

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
    """Apply a correction. ``config.corrections.CORRECTIONS`` has its formula.

    Args:
        kind: the name of the correction; ``"none"`` gives weight 1 to every response token.
        log_ratio: Δ_t, [B, T].
        mask: [B, T], non-zero at response tokens.
        bounds: the cap, or low and high; None for the correction's defaults.

    Raises ValueError if the shapes differ or are not [B, T], KeyError if there is no correction of this name.
    """
    if log_ratio.shape != mask.shape or log_ratio.dim() != 2:
        raise ValueError(f"Log-ratios and mask must both be [B, T], found {tuple(log_ratio.shape)} and {tuple(mask.shape)}.")
    if kind == "none":
        kept = mask.bool()
        return Corrected(kept.to(log_ratio.dtype), kept, torch.zeros_like(kept))
    correction, (low, high) = CORRECTIONS[kind], interval(kind, bounds)
    found, counted = _LEVELS[correction.level](log_ratio, mask).exp(), mask.bool()
    outside = counted & ((found > high) if correction.truncates else (found < low) | (found > high))
    kept = counted if correction.truncates else counted & ~outside  # NaN is never outside, so it is kept and propagates
    if correction.truncates:
        found = found.clamp(max=high)
    elif correction.level == "geometric":  # a mask
        found = torch.where(found.isnan(), found, 1.0)
    return Corrected(torch.where(kept, found, 0.0).to(log_ratio.dtype), kept, outside)


def _tokens(log_ratio: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Δ_t in float64, [B, T]; 0 at padding."""
    return log_ratio.detach().double().masked_fill(~mask.bool(), 0.0)


def _products(log_ratio: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """ΣΔ_t of the row, at each of its tokens. [B, T]"""
    return _tokens(log_ratio, mask).sum(-1, keepdim=True).expand(log_ratio.shape)


def _means(log_ratio: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """ΣΔ_t / n of the row, at each of its tokens. [B, T]"""
    return _products(log_ratio, mask) / mask.bool().sum(-1, keepdim=True).clamp(min=1)


_LEVELS = {"token": _tokens, "sequence": _products, "geometric": _means}


def _cast(found: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return found.clamp(max=torch.finfo(dtype).max).to(dtype)


# ---- Objectives that need more than a weight on the framework's loss: PPO's own, and QuRL's ACR ----
# Each function returns the loss of every token, [B, T]; the framework aggregates it over the mask. π_θ is the policy in training,
# π_old the policy that sampled, as the trainer computes it, and μ the same policy as the rollout computes it.
# R_t = π_θ(y_t) / π_old(y_t).

#: policy log-ratios are clamped to ±20, as in verl and OpenRLHF
_SAFE = 20.0


def ppo_loss(
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    advantages: torch.Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    upper: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """−min(R·A, clip(R, 1−ε_low, 1+ε_high)·A) (PPO, arXiv 1707.06347), for A < 0 at most −c·A (arXiv 1912.09729).

    Args:
        log_prob: log π_θ. old_log_prob: log π_old. advantages: A. All [B, T].
        dual_clip: c; None for no dual clip.
        upper: upper limits of the clip, [B, T], instead of 1 + ε_high.

    Returns:
        The loss of each token, and whether the clip blocks its gradient (bool), both [B, T].
    """
    ratio = (log_prob - old_log_prob).clamp(-_SAFE, _SAFE).exp()
    high = torch.full_like(ratio, 1 + clip_high) if upper is None else upper
    free = -advantages * ratio
    clipped = -advantages * torch.minimum(ratio.clamp(min=1 - clip_low), high)
    loss = torch.maximum(free, clipped)
    if dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -advantages * dual_clip), loss)
    return loss, clipped > free


def acr_loss(
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    advantages: torch.Tensor,
    ratio: torch.Tensor,
    cap: float,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """−min(ρ, C)·min(R·A, clip(R, 1−ε, (1+ε)/r)·A), r = min(1, C/ρ): QuRL's J_ACR (arXiv 2602.13953).

    Where TIS truncates ρ to C, it scales a token's update down by r; ACR therefore widens the upper clip by 1/r. Elsewhere r = 1,
    and the loss is bit-equal to ``tis`` on top of ``ppo_loss``. The other arguments are those of ``ppo_loss``.

    Args:
        ratio: ρ_t before truncation, [B, T].
        cap: C.
    """
    rho = ratio.detach()
    upper = acr_upper(rho, cap, clip_high)
    loss, clipped = ppo_loss(log_prob, old_log_prob, advantages, clip_low, clip_high, dual_clip, upper)
    return loss * rho.clamp(max=cap), clipped


def acr_upper(ratio: torch.Tensor, cap: float, clip_high: float) -> torch.Tensor:
    """(1+ε)/r, r = min(1, C/ρ): ``acr_loss``'s upper limits of the clip, [B, T]."""
    return (1 + clip_high) / (cap / ratio).clamp(max=1.0)  # rho = 0 gives 1
