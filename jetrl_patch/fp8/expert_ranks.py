"""The experts of a layer in a trainer whose ranks hold some of them each (expert parallelism), with the bits of an exact rollout.

A sum over experts has one order, whoever computes the experts. So a rank that holds an expert sends its unrounded outputs back to
the ranks whose tokens they are, and each of these weights and adds its own tokens' in the order of the rollout (``mixture``):

    forward    every rank gathers all tokens in FP8, computes its experts, and returns FP32 rows, one for each pair
    backward   every rank gathers the tokens again and dY in BF16, and returns FP32 sums, one row for each token

Gathering costs each rank a byte per element of all tokens; with eight experts per token and up to eight ranks, sending each token
only where it is needed would save little. In the forward pass the host waits for the numbers of tokens and of pairs, and three
copies of a rank's FP32 rows are alive at once.

Shape legend: T tokens of this rank, A tokens of all ranks, k experts per token, E experts, n of them on this rank, H hidden size,
I intermediate size, F = 2I, P pairs of a token and an expert, S parts of an expert's output.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from jetrl_patch.backends.quantize import Quantized
from jetrl_patch.errors import ModelError, explain
from jetrl_patch.fp8.experts import Experts, ExpertWeights, run_backward, run_expert, space_for
from jetrl_patch.fp8.grouped import Saved
from jetrl_patch.fp8.linear import backward_pass
from jetrl_patch.fp8.mixture import Group, added, groups_of, weighted_sums


class ExpertRanks:
    """The ranks that share a layer's experts, in equal ranges. What it exchanges is collective.

    Args:
        group: a ``torch.distributed`` group.
        experts: E.

    Raises:
        ModelError: the ranks do not divide the experts.
    """

    def __init__(self, group: Any, experts: int) -> None:
        self.group, self.experts = group, experts
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        if experts % self.size:
            required, fix = f"a number that {self.size} expert-parallel ranks divide", "change the trainer's expert parallel size"
            raise ModelError(explain("experts of a layer", required=required, found=str(experts), fix=fix))
        self.each = experts // self.size
        self.held = range(self.rank * self.each, (self.rank + 1) * self.each)

    def matrices(
        self, own: Experts, gate_up_nFH: Sequence[Tensor], down_nHI: Sequence[Tensor], **options: Any
    ) -> Callable[[int], ExpertWeights]:
        """Gives the quantized matrices of one of this rank's experts, by its index in the layer; see ``Experts.quantized``."""
        return lambda expert: own.quantized(expert - self.held.start, gate_up_nFH, down_nHI, **options)

    def gather(self, counts: Sequence[int], *parts: Tensor) -> list[Tensor]:
        """Tensors [T, …] of this rank's tokens -> those of all ranks [A, …], in rank order. ``counts``: the T of each rank."""
        bytes_TB = [part.contiguous().flatten(1).view(torch.uint8) for part in parts]
        most, width = max(counts), sum(part.shape[1] for part in bytes_TB)
        own = torch.zeros(most, width, dtype=torch.uint8, device=parts[0].device)
        torch.cat(bytes_TB, 1, out=own[: counts[self.rank]])
        every = torch.empty(self.size * most, width, dtype=torch.uint8, device=own.device)
        dist.all_gather_into_tensor(every, own, group=self.group)
        rows = torch.cat([block[:count] for block, count in zip(every.split(most), counts, strict=True)])
        split = rows.split([part.shape[1] for part in bytes_TB], 1)
        return [
            found.contiguous().view(part.dtype).view(-1, *part.shape[1:]) for found, part in zip(split, parts, strict=True)
        ]

    def counts(self, tokens: int, device: Any) -> list[int]:
        """The number of tokens of each rank."""
        every = torch.empty(self.size, dtype=torch.int64, device=device)
        dist.all_gather_into_tensor(every, torch.tensor([tokens], device=device), group=self.group)
        found: list[int] = every.tolist()
        return found

    def exchange(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Send the next ``sent[r]`` rows to rank r. Returns the ``received[r]`` rows of each, in rank order."""
        found = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(found, rows.contiguous(), received, sent, group=self.group)
        return found


class _RankedMixture(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TH: Tensor, weights_Tk: Tensor, ids_Tk: Tensor, own: Experts, ranks: ExpertRanks, *parameters: Tensor
    ) -> Tensor:
        gate_up, down = parameters[: ranks.each], parameters[ranks.each :]
        form, (H, I) = own.scale_format, down[0].shape
        x = own.backend.quantize_activation(x_TH.to(torch.bfloat16), form)
        counts = ranks.counts(len(x_TH), x_TH.device)
        q_AH, s_AG, ids_Ak = ranks.gather(counts, *x, ids_Tk)
        groups = list(groups_of(ids_Ak, ranks.experts, ranks.held))
        pairs = groups[-1].span.stop if groups else 0
        saved = space_for(pairs, x_TH, I, own)
        matrices = ranks.matrices(own, gate_up, down, last=not any(ctx.needs_input_grad))
        rows_PSH = x_TH.new_empty(pairs, own.split.ranks if own.split.by == "columns" else 1, H, dtype=torch.float32)
        everyones = Quantized(q_AH, s_AG, "rows", form)
        for group in groups:
            found = run_expert(everyones, group, matrices, ranks.experts, own.backend, saved, own.split)
            for at, (_, y_nH) in enumerate(found):
                rows_PSH[group.span, at] = y_nH
        outputs_PSH = _sent_home(rows_PSH, groups, ids_Tk, counts, ranks)

        def outputs(group: Group) -> Iterator[tuple[int, Tensor]]:
            for at, (part, _) in enumerate(own.split.places(group.expert, ranks.experts, I)):
                yield part, outputs_PSH[group.span, at]

        y_TH = added(weighted_sums(ids_Tk, weights_Tk, (ranks.experts, H), outputs, own.split.ranks))
        ctx.save_for_backward(*x, saved.ab_PF, *saved.h, weights_Tk, ids_Tk, *parameters)
        ctx.own, ctx.ranks, ctx.x_dtype, ctx.counts, ctx.made_in = own, ranks, x_TH.dtype, counts, backward_pass()
        return y_TH

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        q_TH, s_TG, ab_PF, qh_PI, sh_PG, weights_Tk, ids_Tk, *parameters = ctx.saved_tensors
        own, ranks, counts, form = ctx.own, ctx.ranks, ctx.counts, ctx.own.scale_format
        gate_up, down = parameters[: ranks.each], parameters[ranks.each :]
        dy_TH = grad_outputs[0].to(torch.bfloat16)
        q_AH, s_AG, dy_AH, weights_Ak, ids_Ak = ranks.gather(counts, q_TH, s_TG, dy_TH, weights_Tk, ids_Tk)
        saved = Saved(ab_PF, Quantized(qh_PI, sh_PG, "rows", form))
        matrices = ranks.matrices(own, gate_up, down, last=True, made_in=ctx.made_in)
        trained = any(ctx.needs_input_grad[-len(parameters) :])
        wanted = [torch.float32, *(part[0].dtype if trained else None for part in (gate_up, down))]
        found = run_backward(
            own.backend, dy_AH, Quantized(q_AH, s_AG, "rows", form), saved, matrices, weights_Ak, ids_Ak, (gate_up, down),
            wanted, held=ranks.held, experts=ranks.experts,
        )  # fmt: skip
        assert found.dx_TH is not None
        sums_AF = torch.cat((found.dx_TH, found.dweights_Tk), 1)
        tokens = len(ids_Tk)
        parts_RTF = ranks.exchange(sums_AF, counts, [tokens] * ranks.size).view(ranks.size, tokens, -1)
        dx_TH, dweights_Tk = functools.reduce(torch.add, parts_RTF.unbind()).split((q_TH.shape[1], ids_Tk.shape[1]), 1)
        gradients = [None] * len(parameters)
        if found.dgate_up is not None and found.ddown is not None:
            gradients = [*found.dgate_up.unbind(), *found.ddown.unbind()]
        return dx_TH.to(ctx.x_dtype), dweights_Tk.to(weights_Tk.dtype), None, None, None, *gradients


def _sent_home(
    rows_PSH: Tensor, groups: Sequence[Group], ids_Tk: Tensor, counts: Sequence[int], ranks: ExpertRanks
) -> Tensor:
    """The outputs of this rank's experts -> those of all experts for this rank's tokens, sorted by expert, then by token.

    Within a rank's experts the rows are already in that order, and ranks hold ascending experts.
    """
    device = ids_Tk.device
    homes_A = torch.repeat_interleave(torch.arange(ranks.size, device=device), torch.tensor(counts, device=device))
    tokens_P = torch.cat([group.tokens for group in groups]) if groups else homes_A[:0]
    homes_P, by_home = homes_A[tokens_P].sort(stable=True)
    owners = (ids_Tk.reshape(-1) // ranks.each).bincount(minlength=ranks.size)
    sent, received = torch.stack((homes_P.bincount(minlength=ranks.size), owners)).tolist()
    return ranks.exchange(rows_PSH[by_home], sent, received)


def ranked_experts_forward(
    x_TH: Tensor,
    gate_up_nFH: Sequence[Tensor],
    down_nHI: Sequence[Tensor],
    weights_Tk: Tensor,
    ids_Tk: Tensor,
    own: Experts,
    ranks: ExpertRanks,
) -> Tensor:
    """As ``experts.experts_forward``, with the parameters of this rank's experts one by one. Collective, in both directions.

    ``own`` counts them alone; ``ids_Tk`` are indices among all. Parameters get the gradients of the tokens of all ranks.
    """
    result: Tensor = _RankedMixture.apply(x_TH, weights_Tk, ids_Tk, own, ranks, *gate_up_nFH, *down_nHI)
    return result
