"""What trainer and rollout share of a mixture of experts: the split over ranks, the grouping of tokens, and the weighted sums."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from jetrl_patch.backends.capability import check_triton
from jetrl_patch.errors import UNQUANTIZED, ConfigError, ModelError, explain
from jetrl_patch.kernels.formats import BLOCK, split_width

__all__ = ["WHOLE", "ExpertSplit", "Group", "added", "groups_of", "weighted_sums"]


# ---- How a rollout splits the experts of a block over its ranks, and how the ranks' sums are added in exact mode
#     columns   (tensor parallelism)   rank i holds columns i of each expert's intermediate size:
#                                      part_i = sum over the chosen experts e of w_e * (h_e,i Wd_e,i^T)
#     experts   (expert parallelism)   rank i holds an equal range of the experts:
#                                      part_i = sum over the chosen experts e of range i of w_e * (h_e Wd_e^T)
#
#     y = bf16( part_0 + part_1 + ... )         parts in FP32, added in rank order, rounded once
#
# FP32 sums depend on their order, so the trainer, which holds all experts, forms the same parts. Outside of exact mode vLLM
# adds the ranks' sums in BF16, in any order, and the trainer forms one.

@dataclass(frozen=True)
class ExpertSplit:
    """The parts of one sum over experts.

    Attributes:
        ranks: number of parts.
        by: what a rank holds a part of.
    """

    ranks: int = 1
    by: Literal["columns", "experts"] = "columns"

    @classmethod
    def of(cls, tp: int, ep: int = 1) -> ExpertSplit:
        """Return the split of a rollout. Raises ConfigError for an expert-parallel size other than 1 and ``tp``."""
        if ep not in (1, tp):
            what, fix = "expert parallel size of the rollout", "use one of these: the ranks of one engine share its experts"
            raise ConfigError(explain(what, required=f"1, or its tensor parallel size {tp}", found=ep, fix=fix))
        return cls(tp, "experts" if ep > 1 else "columns")

    @classmethod
    def chosen(cls, tp: int, experts: int, width: int) -> ExpertSplit:
        """Return the split by columns, or by experts where columns would cut a block and the ranks divide the experts."""
        columns = cls(tp)
        return cls(tp, "experts") if columns.cuts(width) and experts % tp == 0 else columns

    def cuts(self, width: int) -> bool:
        """Whether a part ends inside a block of an expert's intermediate size ``width``."""
        return self.by == "columns" and self.ranks > 1 and width % (self.ranks * BLOCK) != 0

    def __str__(self) -> str:
        """The split as trainer and rollout compare it; empty if there is none."""
        return f"{self.ranks} ranges of {self.by}" if self.ranks > 1 else ""

    def check(self, what: str, experts: int, width: int) -> None:
        """Raise ModelError if the ranks' parts are not equal, or cut a block.

        Args:
            what: names the experts in the message.
            experts: how many a block has.
            width: their intermediate size.
        """
        if self.by == "experts" and experts % self.ranks:
            required = f"a number that {self.ranks} expert parallel ranks divide"
            fix = f"change the rollout's expert parallel size, or use {UNQUANTIZED}"
            raise ModelError(explain(what, required=required, found=f"{experts} experts", fix=fix))
        if self.cuts(width):
            required = f"an intermediate size of which each of {self.ranks} tensor parallel ranks holds whole blocks of {BLOCK}"
            fix = "use expert parallelism in the rollout, which keeps experts whole, or a smaller tensor parallel size"
            raise ModelError(explain(what, required=required, found=width, fix=fix))

    def places(self, expert: int, experts: int, width: int) -> Iterator[tuple[int, slice]]:
        """Yield the parts to which an expert adds, each with the columns of its intermediate size."""
        if self.by == "experts":
            yield expert // (experts // self.ranks), slice(0, width)
            return
        step = split_width(width, self.ranks)
        for rank in range(self.ranks):
            yield rank, slice(rank * step, (rank + 1) * step)


WHOLE = ExpertSplit()


def added(parts_RMN: Tensor) -> Tensor:
    """Add the FP32 sums [R, M, N] of R ranks in rank order and round once: BF16 [M, N]. One launch where the kernel runs."""
    if parts_RMN.is_cuda and not torch.compiler.is_compiling() and check_triton()[0]:
        from jetrl_patch.kernels.digest import rank_sum

        return rank_sum(parts_RMN)
    total_MN = parts_RMN[0]
    for part_MN in parts_RMN[1:]:
        total_MN = total_MN + part_MN
    return total_MN.to(torch.bfloat16)


# ---- What trainer and rollout share of a mixture of experts: grouping tokens by expert, and the weighted sums
#     y_t = bf16( sum over the chosen experts e, ascending, of w_te * expert_e(x_t) )         expert_e unrounded, FP32
#
# A product and a sum are each rounded to FP32. So a token's bits depend on its own input, experts and weights: not on how many
# tokens an expert gets, nor on their order. Where a rollout splits the experts over ranks, the sum has one part per rank
# (``ranks``).
#
# Shape legend: T tokens, k experts per token, E experts, H hidden size, n tokens of one expert, R parts.

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
