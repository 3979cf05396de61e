"""What trainer and rollout share of a mixture of experts: splits, groups of tokens, weighted sums, BF16 products, watching."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from jetrl_patch.backends import Backend
from jetrl_patch.backends.capability import check_triton
from jetrl_patch.backends.quantize import Quantized, ScaleLayout
from jetrl_patch.config.formats import ScaleFormat
from jetrl_patch.errors import UNQUANTIZED, ConfigError, ModelError, explain
from jetrl_patch.exact import ops
from jetrl_patch.exact.elementwise import silu_mul
from jetrl_patch.kernels.formats import BLOCK, groups, split_width
from jetrl_patch.models.structure import Projection

# ---- How a rollout splits the experts of a block over its ranks, and how the ranks' sums are added in exact mode
#     columns   (tensor parallelism)   rank i holds columns i of each expert's intermediate size:
#                                      part_i = sum over the chosen experts e of w_e * (h_e,i Wd_e,i^T)
#     experts   (expert parallelism)   rank i holds an equal range of the experts:
#                                      part_i = sum over the chosen experts e of range i of w_e * (h_e Wd_e^T)
#
#     y = bf16( part_0 + part_1 + ... )         parts in FP32, added in rank order, rounded once
#
# FP32 sums depend on their order, so the trainer, which holds all experts, forms the same parts. Outside exact mode, vLLM adds
# the ranks' sums in BF16, in any order, and the trainer forms one sum.

@dataclass(frozen=True)
class ExpertSplit:
    """The parts of a sum over experts: one for each of ``ranks``, which holds some columns of each expert or some experts."""

    ranks: int = 1
    by: Literal["columns", "experts"] = "columns"

    @classmethod
    def of(cls, tp: int, ep: int = 1) -> ExpertSplit:
        """The split of a rollout. Raises ConfigError for an expert-parallel size other than 1 and ``tp``."""
        if ep not in (1, tp):
            what, fix = "expert parallel size of the rollout", "use one of these: the ranks of one engine share its experts"
            raise ConfigError(explain(what, required=f"1, or its tensor parallel size {tp}", found=ep, fix=fix))
        return cls(tp, "experts" if ep > 1 else "columns")

    @classmethod
    def chosen(cls, tp: int, experts: int, width: int) -> ExpertSplit:
        """The split by columns, or by experts if columns would cut a block and the ranks divide the experts."""
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
            experts: number of experts of a block.
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
        """Yield the parts that an expert adds to, each with its columns of the intermediate size."""
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
    return functools.reduce(torch.add, parts_RMN.unbind()).to(torch.bfloat16)


# ---- Tokens grouped by expert, and the weighted sums ---------------------------------------------
#     y_t = bf16( sum over the chosen experts e, ascending, of w_te * expert_e(x_t) )         expert_e unrounded, FP32
#
# Each product and each sum is rounded to FP32. So a token's bits depend on its own input, experts and weights, and not on the
# number or order of an expert's tokens. If a rollout splits the experts over ranks, the sum has one part per rank.
#
# Shape legend: T tokens, k experts per token, E experts, H hidden size, n tokens of one expert, R parts.

class Group(NamedTuple):
    """The tokens of one expert.

    Attributes:
        expert: its index.
        tokens: their rows [n] in the batch, ascending; no token is twice in a group.
        slots: the place of the expert among the k of each token, [n].
        span: their range among the pairs of token and expert that are asked for, sorted by expert.
    """

    expert: int
    tokens: Tensor
    slots: Tensor
    span: slice


def groups_of(ids_Tk: Tensor, experts: int, held: range | None = None) -> Iterator[Group]:
    """Yield the experts that have tokens, ascending: all, or those in ``held``. Raises ModelError for an index beyond all."""
    flat = ids_Tk.reshape(-1)
    counts = torch.bincount(flat, minlength=experts).tolist()
    if len(counts) > experts:
        required, found = f"indices below {experts}", str(len(counts) - 1)
        fix = "turn off expert parallelism in the trainer"
        raise ModelError(explain("the experts of a batch", required=required, found=found, fix=fix))
    held = range(experts) if held is None else held
    order, k, start = torch.argsort(flat, stable=True)[sum(counts[: held.start]) :], ids_Tk.shape[1], 0
    for expert in held:
        if count := counts[expert]:
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
        ids_Tk: indices of its experts, in any order, no two equal. weights_Tk: their weights.
        sizes: (E, H).
        outputs: computes a group's expert. Yields the parts that it adds to, each with what it adds, unrounded: FP32 [n, H].
        held: the experts to add. None for all.

    Returns:
        FP32 [R, T, H].
    """
    experts, width = sizes
    total_RTH = torch.zeros(parts, ids_Tk.shape[0], width, dtype=torch.float32, device=ids_Tk.device)
    for group in groups_of(ids_Tk, experts, held):
        weight_n1 = weights_Tk[group.tokens, group.slots].float().unsqueeze(-1)
        for part, y_nH in outputs(group):
            total_RTH[part].index_add_(0, group.tokens, weight_n1 * y_nH)
    return total_RTH


# ---- What the monitor sees of experts: the operands of their products, which hooks on modules do not see
#     activations: x of gate and up, SiLU(a) * b of down            gradients: da of gate, db of up, dy of down
#
# Each row is a pair of token and expert; pairs are sorted by expert. A watch chooses rows, so only what it measures is copied,
# and no count is read back to the host. The layer's results do not change.
#
# Shape legend: T tokens, k experts per token, P = T * k pairs, H hidden size, I intermediate size, n rows.

#: takes one operand: its kind, the matrix that reads it, the expert of each row [P], and a function from rows to values
Watch = Callable[[str, Projection, Tensor, Callable[[Tensor], Tensor]], None]


class Watched:
    """One forward and its backward."""

    def __init__(self, watch: Watch, ids_Tk: Tensor) -> None:
        self._watch = watch
        self._experts_P, order_P = ids_Tk.reshape(-1).sort(stable=True)
        self._tokens_P = order_P // ids_Tk.shape[1]

    @torch.no_grad()
    def forward(self, x_TH: Tensor, a_PI: Tensor, b_PI: Tensor) -> None:
        """See the activations. Gate and up read the same one, which is named after gate."""
        self._watch("activation", "gate_proj", self._experts_P, lambda rows: x_TH[self._tokens_P[rows]])
        self._watch("activation", "down_proj", self._experts_P, lambda rows: silu_mul(a_PI[rows], b_PI[rows]))

    @torch.no_grad()
    def backward(self, dy_TH: Tensor, da_PI: Tensor, db_PI: Tensor) -> None:
        """See the gradients as DGrad quantizes them."""
        self._watch("gradient", "gate_proj", self._experts_P, lambda rows: da_PI[rows])
        self._watch("gradient", "up_proj", self._experts_P, lambda rows: db_PI[rows])
        self._watch("gradient", "down_proj", self._experts_P, lambda rows: dy_TH[self._tokens_P[rows]])


# ---- Experts in BF16, behind the interface of an FP8 backend: those that ``exclude`` names or the precision guard has moved
# The quantizer is the identity, with scales of 1 that nobody reads. So ``experts`` computes the same sums over experts on both
# sides, including the parts of a split. In exact mode a row's bits depend on that row alone. Shape legend as in
# ``backends.base``.

class PlainProducts(Backend):
    """BF16 products: with independent rows (``exact``), or torch's own."""

    name = "bf16"

    def __init__(self, exact: bool) -> None:
        self.exact = exact

    def quantize_activation(self, x_MK: Tensor, scale_format: ScaleFormat) -> Quantized:
        """The tokens themselves, BF16."""
        return self._plain(x_MK, (x_MK.shape[0], groups(x_MK.shape[1])), "rows", scale_format)

    def quantize_weight(self, w_NK: Tensor, scale_format: ScaleFormat) -> Quantized:
        """The BF16 value of a weight."""
        return self._plain(w_NK.detach(), (groups(w_NK.shape[0]), groups(w_NK.shape[1])), "blocks", scale_format)

    def _plain(self, x: Tensor, scales: tuple[int, int], layout: ScaleLayout, scale_format: ScaleFormat) -> Quantized:
        one = torch.ones((), dtype=torch.float32, device=x.device)
        return Quantized(x.to(torch.bfloat16), one.expand(scales), layout, scale_format)

    def gemm(self, x: Quantized, w: Quantized, out_dtype: torch.dtype, splits: int = 1) -> Tensor:
        """[M, N] of BF16 operands, in BF16 or FP32. In exact mode FP32 is the unrounded sum."""
        assert splits == 1  # the parts of a sum over experts are formed outside of the products
        if not self.exact:
            return F.linear(x.q, w.q).to(out_dtype)
        product = ops.linear if out_dtype == torch.bfloat16 else ops.partial_sum
        return product(x.q, w.q)

    def dgrad(self, dy_MN: Tensor, w: Quantized, out_dtype: torch.dtype) -> Tensor:
        """dX [M, K], summed in FP32."""
        return torch.mm(dy_MN.float(), w.q.float()).to(out_dtype)

    def wgrad(self, dy_MN: Tensor, x: Quantized, out_dtype: torch.dtype) -> Tensor:
        """dW [N, K], summed in FP32."""
        return torch.mm(dy_MN.float().t(), x.q.float()).to(out_dtype)
