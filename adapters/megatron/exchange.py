"""Context parallelism for attention that must see whole sequences: ranks exchange tokens for heads.

Each of R ranks holds two of 2R equal chunks of every sequence, chunk r and chunk 2R - 1 - r (the "zigzag" layout of Megatron and
verl). Ring attention would add the chunks' parts in another order on each rank, so its bits cannot be those of the rollout.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _AllToAll(torch.autograd.Function):
    """Sends part r [R, …] to rank r, and returns what the ranks sent, in rank order. It is its own inverse."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: Any) -> Tensor:
        ctx.group = group
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        received = torch.empty_like(grad_outputs[0], memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, grad_outputs[0].contiguous(), group=ctx.group)
        return received, None


class HeadExchange:
    """Exchanges this rank's t tokens of h heads for all T = R t tokens of h / R heads. Collective, differentiable.

    Args:
        group: the R ranks.
        cu_seqlens: int [S + 1], where the padded sequences begin among all tokens, and T. Lengths are multiples of 2R.
        tokens: t.
    """

    def __init__(self, group: Any, cu_seqlens: Tensor, tokens: int) -> None:
        self._group, self._ranks = group, dist.get_world_size(group)
        ranks, self.rank = self._ranks, dist.get_rank(group)
        at = torch.arange(ranks * tokens, device=cu_seqlens.device)
        sequence = torch.searchsorted(cu_seqlens, at, right=True) - 1
        begins = cu_seqlens[sequence]
        chunk = torch.diff(cu_seqlens)[sequence] // (2 * ranks)
        number = (at - begins) // chunk
        second = number >= ranks
        owner = torch.where(second, 2 * ranks - 1 - number, number)
        # where a token is among those of all ranks, one rank after another
        self._place = owner * tokens + begins // ranks + (at - begins) % chunk + second * chunk

    def to_heads(self, x: Tensor) -> Tensor:
        """All heads of this rank's tokens [t, h, D] -> this rank's heads of all tokens, in order, [T, h / R, D]."""
        tokens, heads, width = x.shape
        parts = x.view(tokens, self._ranks, heads // self._ranks, width).transpose(0, 1).contiguous()
        received: Tensor = _AllToAll.apply(parts, self._group)
        return received.flatten(0, 1)[self._place]

    def to_all(self, x: Tensor) -> Tensor:
        """What all heads share: of this rank's tokens, [t, 1, D] -> of all tokens, in order, [T, 1, D]."""
        return self.to_heads(x.expand(-1, self._ranks, -1))

    def own(self, x: Tensor) -> Tensor:
        """The rows that belong to this rank's heads, of a tensor [rows, …] with equally many for each head."""
        return x.chunk(self._ranks)[self.rank]

    def to_tokens(self, x: Tensor) -> Tensor:
        """This rank's heads of all tokens [T, h / R, D] -> all heads of this rank's tokens [t, h, D]."""
        total, heads, width = x.shape
        parts = torch.empty_like(x).index_copy(0, self._place, x).view(self._ranks, total // self._ranks, heads, width)
        received: Tensor = _AllToAll.apply(parts, self._group)
        return received.transpose(0, 1).reshape(total // self._ranks, self._ranks * heads, width)
