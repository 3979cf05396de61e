"""How a rollout splits the experts of a block over its ranks, and how the ranks' sums are added in exact mode.

    columns   (tensor parallelism)   rank i holds columns i of each expert's intermediate size:
                                     part_i = sum over the chosen experts e of w_e * (h_e,i Wd_e,i^T)
    experts   (expert parallelism)   rank i holds an equal range of the experts:
                                     part_i = sum over the chosen experts e of range i of w_e * (h_e Wd_e^T)

    y = bf16( part_0 + part_1 + ... )         parts in FP32, added in rank order, rounded once

FP32 sums depend on their order, so the trainer, which holds all experts, forms the same parts. Outside of exact mode vLLM
adds the ranks' sums in BF16, in any order, and the trainer forms one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from jetrl_patch.errors import UNQUANTIZED, ConfigError, ModelError, explain
from jetrl_patch.fp8.backends.capability import check_triton
from jetrl_patch.fp8.formats import BLOCK, split_width

__all__ = ["WHOLE", "ExpertSplit", "added"]


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
        from jetrl_patch.kernels.rank_sum import rank_sum

        return rank_sum(parts_RMN)
    total_MN = parts_RMN[0]
    for part_MN in parts_RMN[1:]:
        total_MN = total_MN + part_MN
    return total_MN.to(torch.bfloat16)
