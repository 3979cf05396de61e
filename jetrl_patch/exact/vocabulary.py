"""Logits whose vocabulary is split over a trainer's ranks, as Megatron splits it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from jetrl_patch.exact.logprob import Edit, blocks, log_softmax


class _Gathered(torch.autograd.Function):
    """Concatenate the columns of all ranks. All ranks compute the same function of them, so each one's gradient is its slice."""

    @staticmethod
    def forward(ctx: Any, block: Tensor, group: Any) -> Tensor:
        ctx.ranks, ctx.rank = dist.get_world_size(group), dist.get_rank(group)
        rows, columns = block.shape
        every = block.new_empty(ctx.ranks * rows, columns)
        dist.all_gather_into_tensor(every, block.contiguous(), group=group)
        return every.view(ctx.ranks, rows, columns).transpose(0, 1).reshape(rows, -1)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return grad_outputs[0].chunk(ctx.ranks, 1)[ctx.rank], None


def whole_vocabulary(group: Any, vocabulary: int, dtype: torch.dtype) -> Edit:
    """An edit for ``token_log_probs`` of logits [rows, V / ranks]: gather the block of rows that it is given. Collective.

    Args:
        group: the ranks, each of which calls ``token_log_probs`` with the same rows, forward and backward.
        vocabulary: V. Columns beyond it, with which a framework pads the vocabulary, are cut off.
        dtype: that of the logits, in which they travel. A block is FP32, without more information than they had.
    """
    alone = dist.get_world_size(group) == 1

    def gather(block: Tensor, rows: slice) -> Tensor:
        every: Tensor = block if alone else _Gathered.apply(block.to(dtype), group).float()
        return every[:, :vocabulary]

    return gather


def summed(logits: Tensor, temperature: Tensor, edit: Edit, total: Callable[[Tensor], Tensor]) -> Tensor:
    """FP32 [...]: a sum over the whole vocabulary, for logits [..., V / ranks], a block of rows at a time. Collective.

    Args:
        temperature: broadcasts against [..., 1].
        edit: gathers the vocabulary and leaves tokens out of it.
        total: FP32 log-probs [rows, V] -> [rows]. The backward pass computes a block's log-probs again.
    """
    flat = logits.flatten(0, -2)
    temperatures = temperature.expand(*logits.shape[:-1], 1).reshape(-1, 1)

    def of_block(block: Tensor, part: slice) -> Tensor:
        return total(log_softmax(edit(block.float(), part), temperatures[part]))

    found = [checkpoint(of_block, flat[part], part, use_reentrant=False, preserve_rng_state=False) for part in blocks(flat)]
    return torch.cat(found).view(logits.shape[:-1])


def collision(log_probs: Tensor) -> Tensor:
    """Sums of squared probabilities [rows] of distributions [rows, V]."""
    return (2 * log_probs).exp().sum(-1)
