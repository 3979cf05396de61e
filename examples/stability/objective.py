"""The losses, built from the plugin's formulas (``jetrl_patch.measure.corrections``)."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from examples.stability.arms import Arm
from jetrl_patch.measure.corrections import correct, gspo_loss, policy_gradient_loss, ppo_loss

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
