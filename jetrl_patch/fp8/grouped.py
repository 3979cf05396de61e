"""The experts of a mixture on a GPU in a fixed number of launches, and their trial on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from jetrl_patch.backends import Backend
from jetrl_patch.backends.gpu import written
from jetrl_patch.backends.quantize import Quantized
from jetrl_patch.backends.row_equality import Verdict
from jetrl_patch.errors import UNQUANTIZED, ModelError, explain
from jetrl_patch.exact import ops
from jetrl_patch.fp8.linear import backward_pass
from jetrl_patch.fp8.mixture import WHOLE, ExpertSplit, HasWatch, Watched, added
from jetrl_patch.kernels.formats import BLOCK, ScaleFormat, groups

__all__ = [
    "Saved", "Stacks", "compare_experts", "grouped_experts_forward", "require_expert_equality", "run_grouped",
]  # fmt: skip


# ---- The experts of a mixture on a GPU: what ``experts`` computes expert by expert, in a fixed number of launches
# No count is read back to the host, so the stream never waits and CUDA graphs can hold it. All experts' bytes lie in two tensors:
#
#     gate_up  e4m3 [2E, I, H], scales [2E, ceil(I / 128), ceil(H / 128)]      gate and up of each expert, in turn
#     down     e4m3 [E, H, I],  scales [E, ceil(H / 128), ceil(I / 128)]
#
# A row's bits are those of the dense Triton product, and the sum over experts is that of ``mixture``. A pair is a token and one
# of its experts; pairs are sorted by expert (``kernels.mixture``). Shape legend as in ``experts``; F = 2I.

class Stacks(NamedTuple):
    """All experts' matrices in blocks: e4m3 [S, N, K] with FP32 scales [S, ceil(N/128), ceil(K/128)]; S = 2E of gate and up."""

    gate_up: Quantized
    down: Quantized


class StackedExperts(HasWatch, Protocol):
    """The experts of a layer, as this module reads them (``experts.Experts``)."""

    scale_format: ScaleFormat
    split: ExpertSplit

    @property
    def backend(self) -> Backend: ...

    def stacks(self, gate_up_EFH: Tensor, down_EHI: Tensor, last: bool = False, made_in: int | None = None) -> Stacks: ...


class Saved(NamedTuple):
    """What backward needs of the forward pass, a row for each pair: gate and up side by side, and their quantized product."""

    ab_PF: Tensor
    h: Quantized


def run_grouped(
    kernels: Any,
    x: Quantized,
    weights_Tk: Tensor,
    ids_Tk: Tensor,
    stacks: Stacks,
    split: ExpertSplit = WHOLE,
    part: torch.dtype | None = None,
) -> tuple[Tensor, Any, Saved]:
    """FProp of the experts: the trainer's forward and the rollout's, in six launches with the quantization of the tokens.

    A split adds two launches and a copy of the matrices for each part by columns, one launch for each part by experts.

    Args:
        kernels: ``Backend.grouped``.
        x: the tokens, e4m3 [T, H] with scales [T, G].
        split: the parts of the sum, all of which are computed here and added as a rollout's ranks add theirs, in BF16.
        part: compute a rank's part, in BF16 or as the unrounded sum in FP32; an index beyond the experts is another rank's.

    Returns:
        [T, H], NaN for a token with an index beyond the experts, unless it is a part; the plan of the pairs; and what backward
        needs.
    """
    experts, _, width = stacks.down.shape
    plan = kernels.plan(ids_Tk, experts)
    ab_PF = kernels.grouped(*x, *stacks.gate_up, plan, tokens=True)
    qh_PI, sh_PG, _ = kernels.silu_mul_quantize_rows(ab_PF[:, :width], ab_PF[:, width:], x.scale_format)
    saved, weights = Saved(ab_PF, Quantized(qh_PI, sh_PG, "rows", x.scale_format)), weights_Tk.float().contiguous()
    if split.ranks > 1:
        return added(torch.stack([*_parts(kernels, saved.h, weights, stacks.down, plan, split)])), plan, saved
    out_PH = kernels.grouped(*saved.h, *stacks.down, plan, torch.float32)
    return kernels.combine(out_PH, plan, weights, part or torch.bfloat16, part is not None), plan, saved


def _parts(
    kernels: Any, h: Quantized, weights_Tk: Tensor, down: Quantized, plan: Any, split: ExpertSplit
) -> Iterator[Tensor]:
    """Yield the FP32 sums [T, H] of a split."""
    experts, _, width = down.shape
    if split.by == "columns":
        for _, at in split.places(0, experts, width):
            q, s = h.columns(at.start, at.stop)
            matrices = down.q[:, :, at].contiguous(), down.s[:, :, at.start // BLOCK : groups(at.stop)]
            out_PH = kernels.grouped(q.contiguous(), s, *matrices, plan, torch.float32)
            yield kernels.combine(out_PH, plan, weights_Tk, torch.float32)
        return
    out_PH = kernels.grouped(*h, *down, plan, torch.float32)
    rank_Tk = plan.ids // (experts // split.ranks)
    for rank in range(split.ranks):
        yield kernels.combine(out_PH, plan, torch.where(rank_Tk == rank, weights_Tk, 0.0), torch.float32)


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TH: Tensor,
        gate_up_EFH: Tensor,
        down_EHI: Tensor,
        weights_Tk: Tensor,
        ids_Tk: Tensor,
        own: StackedExperts,
        watched: Watched | None,
    ) -> Tensor:
        kernels = own.backend.grouped(x_TH)
        x = own.backend.quantize_activation(x_TH.to(torch.bfloat16), own.scale_format)
        stacks = own.stacks(gate_up_EFH, down_EHI, last=not any(ctx.needs_input_grad))
        y_TH, plan, saved = run_grouped(kernels, x, weights_Tk, ids_Tk, stacks, own.split)
        ctx.save_for_backward(*x, saved.ab_PF, *saved.h, gate_up_EFH, down_EHI, weights_Tk, *plan.tensors())
        ctx.own, ctx.x_dtype, ctx.watched, ctx.made_in = own, x_TH.dtype, watched, backward_pass()
        if watched is not None:
            watched.forward(x_TH, *saved.ab_PF.chunk(2, 1))
        return y_TH

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        q_TH, s_TG, ab_PF, qh_PI, sh_PG, gate_up_EFH, down_EHI, weights_Tk, *planned = ctx.saved_tensors
        own: StackedExperts = ctx.own
        kernels, form = own.backend.grouped(q_TH), own.scale_format
        plan = kernels.Plan.of(planned)
        dy_TH = grad_outputs[0].to(torch.bfloat16)
        if dy_TH.stride(1) != 1:  # of a sum, for example; without tokens ``contiguous`` would leave it
            dy_TH = dy_TH.clone(memory_format=torch.contiguous_format)
        weights = weights_Tk.float().contiguous()
        stacks = own.stacks(gate_up_EFH, down_EHI, last=True, made_in=ctx.made_in)
        wants_x, wants_gate_up, wants_down = ctx.needs_input_grad[:3]
        down = _transposed(kernels, stacks.down)
        u_PI = kernels.grouped(*kernels.quantize_rows(dy_TH, form), *down, plan, torch.float32, tokens=True)
        dab_PF, dweights_Tk = kernels.pair_backward(u_PI, ab_PF, qh_PI, sh_PG, weights, plan)
        if ctx.watched is not None:
            ctx.watched.backward(dy_TH, *dab_PF.chunk(2, 1))
        dx = dgate_up = ddown = None
        if wants_down:
            g = kernels.group_tokens(dy_TH, plan, form, weights)
            h = kernels.regroup(qh_PI, sh_PG, plan, form, tokens=False)
            ddown = kernels.grouped_wgrad(g, h, plan, written(down_EHI.dtype)).to(down_EHI.dtype)
        if wants_x:
            P, F = dab_PF.shape
            halves = kernels.quantize_rows(dab_PF.view(2 * P, F // 2), form)  # gate and up in groups of their own
            q, s = (t.view(P, 2 * t.shape[1]) for t in halves)
            gate_up = _transposed(kernels, stacks.gate_up)
            dx_PH = kernels.grouped(q, s, *gate_up, plan, torch.float32, summed=2)
            dx = kernels.combine(dx_PH, plan, None, written(ctx.x_dtype)).to(ctx.x_dtype)
        if wants_gate_up:
            g = kernels.group_tokens(dab_PF, plan, form)
            x = kernels.regroup(q_TH, s_TG, plan, form, tokens=True)
            dgate_up = kernels.grouped_wgrad(g, x, plan, written(gate_up_EFH.dtype)).to(gate_up_EFH.dtype)
        return dx, dgate_up, ddown, dweights_Tk.to(weights_Tk.dtype), None, None, None


def _transposed(kernels: Any, stack: Quantized) -> tuple[Tensor, Tensor]:
    """Each matrix transposed, with its scales."""
    q = kernels.transposed(stack.q) if stack.transposed is None else stack.transposed
    return q, stack.s.transpose(1, 2)


def grouped_experts_forward(
    x_TH: Tensor, gate_up_EFH: Tensor, down_EHI: Tensor, weights_Tk: Tensor, ids_Tk: Tensor, own: StackedExperts
) -> Tensor:
    """As ``experts.experts_forward``, for a backend with grouped products."""
    watched = Watched.begin(own, ids_Tk)
    result: Tensor = _Grouped.apply(x_TH, gate_up_EFH, down_EHI, weights_Tk, ids_Tk, own, watched)
    return result


# ---- The trial: before a rollout serves, test that a token's experts do not depend on the other tokens of the batch
# A decoding step has a few tokens, a training batch thousands, in another order and with other neighbours at each expert. Each
# row of the grouped products is compared with the dense product of the same row, and each token's sum with that of the token
# alone. The test suite proves what a CPU runs.

#: tokens of each expert: none, parts of a tile, whole tiles and one more, many
COUNTS = (0, 1, 127, 129, 900)
#: rows of the batch that are computed again by themselves
PARTS = ((0, 1), (129, 1), (5, 7), (64, 64))

_PROVEN: set[tuple[object, ...]] = set()


@torch.no_grad()
def compare_experts(
    backend: Backend,
    hidden: int,
    width: int,
    device: torch.device | str,
    scale_format: ScaleFormat = "pow2",
    counts: tuple[int, ...] = COUNTS,
) -> Verdict:
    """Compare experts with matrices [width, hidden] and [hidden, width], by a backend that has grouped products."""
    generator = torch.Generator(device).manual_seed(hidden + width)

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.bfloat16) * scale

    E, T = len(counts), sum(counts)
    weights = random(2 * E, width, hidden, scale=hidden**-0.5), random(E, hidden, width, scale=width**-0.5)
    stacks = Stacks(*(backend.quantize_weight(w, scale_format) for w in weights))
    first_T = torch.repeat_interleave(torch.tensor(counts)).to(device)
    shuffled_T = torch.randperm(T, generator=generator, device=device)
    ids_Tk = torch.stack((first_T, (first_T + 1) % E), 1)[shuffled_T]
    x = backend.quantize_activation(random(T, hidden), scale_format)
    verdict = _products(backend, x, stacks, ids_Tk[:, :1])
    if not verdict.ok:
        return verdict
    shares_Tk = random(T, 2).float().softmax(-1)

    def mix(rows: Tensor | slice) -> Tensor:
        kernels = backend.grouped(x.q)
        return run_grouped(kernels, x.rows(rows), shares_Tk[rows], ids_Tk[rows], stacks, part=torch.float32)[0]

    whole_TH, reversed_T = mix(slice(None)), torch.arange(T - 1, -1, -1, device=device)
    unequal = int((mix(reversed_T)[reversed_T] != whole_TH).sum())
    if unequal:
        return Verdict(False, f"{unequal} of {whole_TH.numel()} values differ when the tokens come in another order")
    for start, size in PARTS:
        rows = slice(start, start + size)
        unequal = int((mix(rows) != whole_TH[rows]).sum()) if start + size <= T else 0
        if unequal:
            return Verdict(False, f"{unequal} values of {size} tokens differ from those among {T}")
    return Verdict(True, f"tokens by themselves equal those among {T}, and rows those of dense products")


def _products(backend: Backend, x: Quantized, stacks: Stacks, ids_T1: Tensor) -> Verdict:
    """Compare the rows of both grouped products with dense ones, expert by expert."""
    from jetrl_patch.kernels.gemm import fprop

    kernels, experts = backend.grouped(x.q), stacks.down.shape[0]
    plan = kernels.plan(ids_T1, experts)
    ab_PF = kernels.grouped(*x, *stacks.gate_up, plan, tokens=True)[plan.place.long()]
    a_TI, b_TI = ab_PF.chunk(2, 1)
    qh_PI, sh_PG, _ = kernels.silu_mul_quantize_rows(a_TI, b_TI, "pow2")
    h, sorted_P = Quantized(qh_PI, sh_PG, "rows", "pow2"), plan.order.long()
    y_PH = kernels.grouped(*h.rows(sorted_P), *stacks.down, plan, torch.float32)[plan.place.long()]
    for expert in range(experts):
        rows = (ids_T1[:, 0] == expert).nonzero()[:, 0]
        products = (
            (a_TI, x, stacks.gate_up, 2 * expert),
            (b_TI, x, stacks.gate_up, 2 * expert + 1),
            (y_PH, h, stacks.down, expert),
        )
        for ours, operand, stack, index in products:
            w = Quantized(stack.q[index], stack.s[index], "blocks", stack.scale_format)
            own = operand.rows(rows)
            dense = fprop(own.q, own.s, w.q, w.s_rows, ours.dtype, s_blocks=w.s)
            unequal = int((ours[rows] != dense).sum())
            if unequal:
                found_words = f"{unequal} of {dense.numel()} values of an expert with {len(rows)} tokens"
                return Verdict(False, f"{found_words} differ from the dense product")
    return Verdict(True, "rows equal those of dense products")


def require_expert_equality(
    backend: Backend,
    experts: int,
    chosen: int,
    sizes: tuple[int, int],
    device: torch.device,
    scale_format: ScaleFormat = "pow2",
) -> bool:
    """Run the comparison once per process for each kind of experts; never on a CPU. Reads results back to the host.

    Args:
        experts, chosen: how many there are, and how many a token has.
        sizes: (hidden, width).

    Returns:
        whether it ran now.

    Raises:
        ModelError: this backend has no grouped products here, or a token depends on its batch.
    """
    key = (backend.name, str(device), experts, chosen, *sizes, scale_format)
    if device.type == "cpu" or key in _PROVEN:
        return False
    if backend.grouped(torch.empty(0, device=device)) is None:
        verdict, required = Verdict(False, "none"), "grouped FP8 products, which need a Hopper GPU and the triton package"
    else:
        verdict = compare_experts(backend, *sizes, device, scale_format)
        verdict = verdict if not verdict.ok else _routes(experts, chosen, device)
        required = "tokens that do not depend on the batch"
    if not verdict.ok:
        what, fix = f"experts of {sizes[1]} x {sizes[0]} with backend={backend.name!r}", f"use a dense model, or {UNQUANTIZED}"
        raise ModelError(explain(what, required=required, found=verdict.found, fix=fix))
    torch.cuda.empty_cache()
    _PROVEN.add(key)
    return True


def _routes(experts: int, chosen: int, device: torch.device) -> Verdict:
    """Compare the choice of experts for tokens by themselves and in a batch, with equal logits among those of a token."""
    generator = torch.Generator(device).manual_seed(experts)
    logits = torch.randn(300, experts, generator=generator, device=device).to(torch.bfloat16)
    rule = ops.Sigmoid(torch.zeros(experts, device=device), 1, 1, 1.0)
    for each in (None, rule):
        whole = ops.route(logits, chosen, True, each)
        for rows in (slice(0, 1), slice(5, 12), slice(64, 300)):
            part = ops.route(logits[rows], chosen, True, each)
            if any(not torch.equal(ours, theirs[rows]) for ours, theirs in zip(part, whole, strict=True)):
                return Verdict(False, "routes that differ between tokens by themselves and in a batch")
    return Verdict(True, "routes of tokens by themselves equal those in a batch")
