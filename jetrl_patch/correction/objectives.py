"""Objectives that are more than a weight on the framework's loss: QuRL's ACR, Precision-RL's policy gradients, GSPO.

Each function returns the loss of every token, [B, T], which the framework aggregates over the mask. π_θ is the policy in
training, π_old the policy that sampled, in the trainer's arithmetic, μ the rollout's; R_t = π_θ(y_t) / π_old(y_t).
"""

from __future__ import annotations

from typing import Literal

import torch

from jetrl_patch.correction.weights import correct, seq_ratio

__all__ = ["acr_loss", "gspo_loss", "policy_gradient_loss", "ppo_loss"]

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

    Where TIS truncates ρ to C, it scales the update of a token down by r, so the upper clip is widened by 1/r. Elsewhere
    r = 1, and the loss is bit-equal to ``tis`` on top of ``ppo_loss``.

    Args:
        ratio: ρ_t before truncation, [B, T].
        cap: C.
        The others are as in ``ppo_loss``.
    """
    rho = ratio.detach()
    r = (cap / rho).clamp(max=1.0)  # rho = 0 gives 1
    loss, clipped = ppo_loss(
        log_prob, old_log_prob, advantages, clip_low, clip_high, dual_clip, upper=(1 + clip_high) / r
    )
    return loss * rho.clamp(max=cap), clipped


def policy_gradient_loss(
    log_prob: torch.Tensor,
    rollout_log_prob: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    kind: Literal["seq-is", "seq-tis", "seq-mis"],
    cap: float = 3.0,
) -> torch.Tensor:
    """−w·A·log π_θ(y_t), with w from the sequence ratio ρ_θ = π_θ(y)/μ(y), detached (Precision-RL, arXiv 2510.26788).

    "PG-Seq-IS" w = ρ_θ, "PG-Seq-TIS" w = min(ρ_θ, C), "PG-Seq-MIS" w = ρ_θ·1{ρ_θ ≤ C}. All tensors [B, T].
    verl offers them as ``rollout_correction.bypass_mode`` with ``loss_type=reinforce``.
    """
    log_ratio = (log_prob - rollout_log_prob).detach()
    weights = seq_ratio(log_ratio, mask) if kind == "seq-is" else correct(kind, log_ratio, mask, (cap,)).weights
    return -weights * advantages * log_prob


def gspo_loss(
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    clip_low: float,
    clip_high: float,
) -> torch.Tensor:
    """−min(s·A, clip(s, 1−ε_low, 1+ε_high)·A), s = (π_θ(y)/π_old(y))^(1/n) (GSPO, arXiv 2507.18071, eq. 5–7).

    Every token of a row carries the row's s and so the row's gradient. μ is not used. All tensors [B, T].
    """
    counted = mask.bool()
    length = counted.sum(-1, keepdim=True).clamp(min=1)
    s = (((log_prob - old_log_prob) * counted).sum(-1, keepdim=True) / length).exp()
    return -torch.minimum(s * advantages, s.clamp(1 - clip_low, 1 + clip_high) * advantages) * counted
