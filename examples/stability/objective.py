"""The losses: the plugin's formulas (``jetrl_patch.measure.corrections``), Precision-RL's policy gradients, and GSPO."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor

from examples.stability.arms import Arm
from jetrl_patch.measure.corrections import correct, ppo_loss, seq_ratio

#: DAPO's clip (Precision-RL, arXiv 2510.26788, uses the same)
CLIP = (0.2, 0.28)


@dataclass(frozen=True)
class Batch:
    """The tokens of one step. All fields are [B, T], except ``advantages`` [B, 1]."""

    old: Tensor
    rollout: Tensor
    mask: Tensor
    advantages: Tensor
    weights: Tensor
    kept: Tensor

    def part(self, rows: slice) -> Batch:
        """A mini-batch of its own."""
        return Batch(*(getattr(self, field.name)[rows] for field in fields(self)))


def prepare(arm: Arm, old: Tensor, rollout: Tensor, mask: Tensor, rewards: Tensor, group: int) -> Batch:
    """GRPO's advantages, (r − mean) / (std + 1e-6) over the ``group`` answers to one question, and the arm's weights."""
    r = rewards.view(-1, group)
    advantages = ((r - r.mean(1, keepdim=True)) / (r.std(1, keepdim=True) + 1e-6)).view(-1, 1)
    found = correct(arm.correction, old - rollout, mask)
    return Batch(old, rollout, mask, advantages, found.weights, found.kept)


def loss(arm: Arm, batch: Batch, log_probs: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
    """The contribution of some rows to the mean over the batch's tokens, and to the share of them that PPO clips.

    ``log_probs`` may be narrower than the batch.
    """
    width = log_probs.shape[1]
    old, rollout, mask, weights, kept = (
        t[rows, :width] for t in (batch.old, batch.rollout, batch.mask, batch.weights, batch.kept)
    )
    advantages = batch.advantages[rows].expand_as(log_probs)
    clipped = torch.zeros_like(kept)
    if arm.objective == "pg-seq-is":
        token = policy_gradient_loss(log_probs, rollout, advantages, mask, "seq-is")
    elif arm.objective == "gspo":
        token = gspo_loss(log_probs, old, advantages, mask, 3e-4, 4e-4)
    else:
        token, clipped = ppo_loss(log_probs, old, advantages, *CLIP)
        token = token * weights
    tokens = batch.mask.sum()
    return torch.where(kept, token, 0.0).sum() / tokens, (clipped & kept).sum() / tokens


# ---- Objectives that no framework offers the plugin. All tensors are [B, T]; R, A and μ are those of ``corrections``

def policy_gradient_loss(
    log_prob: Tensor,
    rollout_log_prob: Tensor,
    advantages: Tensor,
    mask: Tensor,
    kind: Literal["seq-is", "seq-tis", "seq-mis"],
    cap: float = 3.0,
) -> Tensor:
    """−w·A·log π_θ(y_t), with w from the sequence ratio ρ_θ = π_θ(y)/μ(y), detached (Precision-RL, arXiv 2510.26788).

    "PG-Seq-IS" w = ρ_θ, "PG-Seq-TIS" w = min(ρ_θ, C), "PG-Seq-MIS" w = ρ_θ·1{ρ_θ ≤ C}. All tensors [B, T].
    verl offers them as ``rollout_correction.bypass_mode`` with ``loss_type=reinforce``.
    """
    log_ratio = (log_prob - rollout_log_prob).detach()
    weights = seq_ratio(log_ratio, mask) if kind == "seq-is" else correct(kind, log_ratio, mask, (cap,)).weights
    return -weights * advantages * log_prob


def gspo_loss(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
) -> Tensor:
    """−min(s·A, clip(s, 1−ε_low, 1+ε_high)·A), s = (π_θ(y)/π_old(y))^(1/n) (GSPO, arXiv 2507.18071, eq. 5–7).

    Every token of a row has the row's s, and therefore its gradient. μ is not used. All tensors [B, T].
    """
    counted = mask.bool()
    length = counted.sum(-1, keepdim=True).clamp(min=1)
    s = (((log_prob - old_log_prob) * counted).sum(-1, keepdim=True) / length).exp()
    return -torch.minimum(s * advantages, s.clamp(1 - clip_low, 1 + clip_high) * advantages) * counted
