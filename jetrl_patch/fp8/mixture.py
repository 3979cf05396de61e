"""What trainer and rollout share of a mixture of experts: grouping tokens by expert, and the weighted sums.

    y_t = bf16( sum over the chosen experts e, ascending, of w_te * expert_e(x_t) )         expert_e unrounded, FP32

A product and a sum are each rounded to FP32. So a token's bits depend on its own input, experts and weights: not on how many
tokens an expert gets, nor on their order. Where a rollout splits the experts over ranks, the sum has one part per rank
(``ranks``).

Shape legend: T tokens, k experts per token, E experts, H hidden size, n tokens of one expert, R parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from jetrl_patch.errors import ModelError, explain

__all__ = ["Group", "groups_of", "weighted_sums"]


@dataclass(frozen=True)
class Group:
    """The tokens of one expert.

    Attributes:
        expert: its index.
        tokens: their rows [n] in the batch, ascending; no token is twice in a group.
        slots: where each finds this expert among its own k, [n].
        span: their places among the T * k pairs of token and expert, sorted by expert.
    """

    expert: int
    tokens: Tensor
    slots: Tensor
    span: slice


def groups_of(ids_Tk: Tensor, experts: int) -> Iterator[Group]:
    """Yield the experts that have tokens, ascending. Raises ModelError for an index beyond ``experts``."""
    flat = ids_Tk.reshape(-1)
    counts = torch.bincount(flat, minlength=experts).tolist()
    if len(counts) > experts:
        raise ModelError(
            explain(
                "the experts of a batch",
                required=f"indices below {experts}",
                found=str(len(counts) - 1),
                fix="turn off expert parallelism in the trainer",
            )
        )
    order, k, start = torch.argsort(flat, stable=True), ids_Tk.shape[1], 0
    for expert, count in enumerate(counts):
        if count:
            span = slice(start, start + count)
            yield Group(expert, order[span] // k, order[span] % k, span)
            start += count


def weighted_sums(
    ids_Tk: Tensor,
    weights_Tk: Tensor,
    sizes: tuple[int, int],
    outputs: Callable[[Group], Iterable[tuple[int, Tensor]]],
    parts: int = 1,
    held: range | None = None,
) -> Tensor:
    """Add up the experts of each token, in parts.

    Args:
        ids_Tk: indices of its experts, in any order and different from one another. weights_Tk: their weights.
        sizes: (E, H).
        outputs: computes a group's expert: the parts it adds to, each with what it adds, unrounded: FP32 [n, H].
        held: the experts to add; None for all.

    Returns:
        FP32 [R, T, H].
    """
    experts, width = sizes
    total_RTH = torch.zeros(parts, ids_Tk.shape[0], width, dtype=torch.float32, device=ids_Tk.device)
    for group in groups_of(ids_Tk, experts):
        if held is None or group.expert in held:
            weight_n1 = weights_Tk[group.tokens, group.slots].float().unsqueeze(-1)
            for part, y_nH in outputs(group):
                total_RTH[part].index_add_(0, group.tokens, weight_n1 * y_nH)
    return total_RTH
