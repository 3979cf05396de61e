"""The experts of a mixture on a GPU in a fixed number of launches, experts in BF16, and what the monitor sees of both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from jetrl_patch.backends import Backend
from jetrl_patch.backends.gpu import written
from jetrl_patch.exact import ops
from jetrl_patch.exact.elementwise import silu_mul
from jetrl_patch.fp8.linear import backward_pass
from jetrl_patch.fp8.mixture import WHOLE, ExpertSplit, added
from jetrl_patch.kernels.formats import BLOCK, ScaleFormat, groups
from jetrl_patch.models.structure import Part

__all__ = ["HasWatch", "PlainProducts", "Saved", "Stacks", "Watch", "Watched", "grouped_experts_forward", "run_grouped"]


# ---- What the monitor sees of experts: the operands of their products, which no hook of a module reaches
#     activations: x of gate and up, SiLU(a) * b of down            gradients: da of gate, db of up, dy of down
#
# Each is a row of a pair of token and expert; pairs are sorted by expert. A watch chooses rows, so nothing is copied that it
# does not measure, and no count is read back to the host. The layer's own results are untouched.
#
# Shape legend: T tokens, k experts per token, P = T * k pairs, H hidden size, I intermediate size, n rows.

class Watch(Protocol):
    """Takes one operand: its kind, the matrix that reads it, the expert of each row [P], and a function from rows to values."""

    def __call__(self, kind: str, part: Part, experts_P: Tensor, take: Callable[[Tensor], Tensor], /) -> None: ...


class HasWatch(Protocol):
    """The experts of a layer, which hold the watch of their next forward."""

    watch: Watch | None


class Watched:
    """One forward and its backward."""

    def __init__(self, watch: Watch, ids_Tk: Tensor) -> None:
        self._watch = watch
        self._experts_P, order_P = ids_Tk.reshape(-1).sort(stable=True)
        self._tokens_P = order_P // ids_Tk.shape[1]

    @classmethod
    def begin(cls, own: HasWatch, ids_Tk: Tensor) -> Watched | None:
        """Take the watch of these experts, if there is one: it sees one forward that autograd records and that has tokens."""
        if own.watch is None or not torch.is_grad_enabled() or ids_Tk.numel() == 0 or torch.compiler.is_compiling():
            return None
        watch, own.watch = own.watch, None
        return cls(watch, ids_Tk)

    @torch.no_grad()
    def forward(self, x_TH: Tensor, a_PI: Tensor, b_PI: Tensor) -> None:
        """See the activations. Gate and up read the same, which is named after gate."""
        self._watch("activation", "gate_proj", self._experts_P, lambda rows: x_TH[self._tokens_P[rows]])
        self._watch("activation", "down_proj", self._experts_P, lambda rows: silu_mul(a_PI[rows], b_PI[rows]))

    @torch.no_grad()
    def backward(self, dy_TH: Tensor, da_PI: Tensor, db_PI: Tensor) -> None:
        """See the gradients as DGrad quantizes them."""
        self._watch("gradient", "gate_proj", self._experts_P, lambda rows: da_PI[rows])
        self._watch("gradient", "up_proj", self._experts_P, lambda rows: db_PI[rows])
        self._watch("gradient", "down_proj", self._experts_P, lambda rows: dy_TH[self._tokens_P[rows]])


# ---- Experts in BF16, behind the interface of an FP8 backend: what ``exclude`` names, and what the precision guard moves
# The quantizer is the identity, with scales of 1 that nobody reads, so that ``experts`` computes the same sums over experts,
# parts of a split included, on both sides. In exact mode a row's bits depend on that row alone.
#
# Shape legend as in ``backends.base``.

class PlainProducts(Backend):
    """BF16 products: with independent rows (``exact``), or torch's own."""

    name = "bf16"

    def __init__(self, exact: bool) -> None:
        self.exact = exact

    def quantize_activation(self, x_MK: Tensor, scale_format: ScaleFormat) -> tuple[Tensor, Tensor]:
        """The tokens themselves, BF16."""
        return x_MK.to(torch.bfloat16), _ones(x_MK, x_MK.shape[0], groups(x_MK.shape[1]))

    def quantize_tokens(self, x_MK: Tensor, scale_format: ScaleFormat) -> tuple[Tensor, Tensor]:
        """As ``quantize_activation``; no product needs it."""
        return x_MK.to(torch.bfloat16), _ones(x_MK, groups(x_MK.shape[0]), x_MK.shape[1])

    def quantize_weight(self, w_NK: Tensor, scale_format: ScaleFormat) -> tuple[Tensor, Tensor]:
        """The BF16 value of a weight."""
        return w_NK.detach().to(torch.bfloat16), _ones(w_NK, groups(w_NK.shape[0]), groups(w_NK.shape[1]))

    def gemm(
        self,
        q_MK: Tensor,
        s_MG: Tensor,
        w_NK: Tensor,
        s_NG: Tensor,
        out_dtype: torch.dtype,
        splits: int = 1,
        s_blocks: Tensor | None = None,
    ) -> Tensor:
        """[M, N] of BF16 operands, in BF16 or FP32. In exact mode FP32 is the unrounded sum."""
        assert splits == 1  # of experts, ``ranks`` forms the parts
        if not self.exact:
            return F.linear(q_MK, w_NK).to(out_dtype)
        product = ops.linear if out_dtype == torch.bfloat16 else ops.partial_sum
        return product(q_MK, w_NK)

    def dgrad(
        self,
        g_MN: Tensor,
        w_NK: Tensor,
        s_blocks: Tensor,
        scale_format: ScaleFormat,
        out_dtype: torch.dtype,
        w_KN: Tensor | None = None,
    ) -> Tensor:
        """dX [M, K], summed in FP32."""
        return torch.mm(g_MN.float(), w_NK.float()).to(out_dtype)

    def wgrad(
        self, g_MN: Tensor, q_MK: Tensor, s_MG: Tensor, scale_format: ScaleFormat, out_dtype: torch.dtype
    ) -> Tensor:
        """dW [N, K], summed in FP32."""
        return torch.mm(g_MN.float().t(), q_MK.float()).to(out_dtype)

    def fingerprint(self, w_NK: Tensor) -> int | None:
        """Nothing is kept of a weight."""
        return None


def _ones(like: Any, *shape: int) -> Tensor:
    return torch.ones((), dtype=torch.float32, device=like.device).expand(shape)


# ---- The experts of a mixture on a GPU: what ``experts`` computes expert by expert, in a fixed number of launches
# No count is read back to the host, so the stream never waits and CUDA graphs can hold it. All experts' bytes lie in two tensors:
#
#     gate_up  e4m3 [2E, I, H], scales [2E, ceil(I / 128), ceil(H / 128)]      gate and up of each expert, in turn
#     down     e4m3 [E, H, I],  scales [E, ceil(H / 128), ceil(I / 128)]
#
# A row's bits are those of the dense Triton product, and the sum over experts is that of ``mixture``. A pair is a token and one
# of its experts; pairs are sorted by expert (``kernels.mixture``). Shape legend as in ``experts``; F = 2I.

class Stacks(NamedTuple):
    """All experts' matrices, each e4m3 [S, N, K] with FP32 scales per block; if held, also transposed, [S, K, N]."""

    gate_up: tuple[Tensor, Tensor]
    down: tuple[Tensor, Tensor]
    transposed: tuple[Tensor | None, Tensor | None] = (None, None)


class StackedExperts(HasWatch, Protocol):
    """The experts of a layer, as this module reads them (``experts.Experts``)."""

    scale_format: ScaleFormat
    split: ExpertSplit

    @property
    def backend(self) -> Backend: ...

    def stacks(self, gate_up_EFH: Tensor, down_EHI: Tensor, last: bool = False, made_in: int | None = None) -> Stacks: ...


class Saved(NamedTuple):
    """What backward needs of the forward pass: the plan, gate and up, and their quantized product, a row for each pair."""

    plan: Any
    ab_PF: Tensor
    qh_PI: Tensor
    sh_PG: Tensor


def run_grouped(
    kernels: Any,
    quantized: tuple[Tensor, Tensor],
    weights_Tk: Tensor,
    ids_Tk: Tensor,
    stacks: Stacks,
    scale_format: ScaleFormat,
    split: ExpertSplit = WHOLE,
    part: torch.dtype | None = None,
) -> tuple[Tensor, Saved]:
    """FProp of the experts: the trainer's forward and the rollout's, in six launches with the quantization of the tokens.

    A split adds two launches and a copy of the matrices for each part by columns, one launch for each part by experts.

    Args:
        kernels: ``Backend.grouped``.
        quantized: the tokens, e4m3 [T, H] with scales [T, G].
        split: the parts of the sum, all of which are computed here and added as a rollout's ranks add theirs, in BF16.
        part: compute a rank's part, in BF16 or as the unrounded sum in FP32; an index beyond the experts is another rank's.

    Returns:
        [T, H], NaN for a token with an index beyond the experts, unless it is a part.
    """
    width = stacks.down[0].shape[2]
    plan = kernels.plan(ids_Tk, stacks.down[0].shape[0])
    ab_PF = kernels.grouped(*quantized, *stacks.gate_up, plan, tokens=True)
    qh_PI, sh_PG, _ = kernels.silu_mul_quantize_rows(ab_PF[:, :width], ab_PF[:, width:], scale_format)
    saved, weights = Saved(plan, ab_PF, qh_PI, sh_PG), weights_Tk.float().contiguous()
    if split.ranks > 1:
        return added(torch.stack([*_parts(kernels, saved, weights, stacks.down, split)])), saved
    out_PH = kernels.grouped(qh_PI, sh_PG, *stacks.down, plan, torch.float32)
    return kernels.combine(out_PH, plan, weights, part or torch.bfloat16, part is not None), saved


def _parts(
    kernels: Any, saved: Saved, weights_Tk: Tensor, down: tuple[Tensor, Tensor], split: ExpertSplit
) -> Iterator[Tensor]:
    """Yield the FP32 sums [T, H] of a split."""
    plan, _, qh_PI, sh_PG = saved
    (q_EHI, s_EBG), experts, width = down, down[0].shape[0], down[0].shape[2]
    if split.by == "columns":
        for _, at in split.places(0, experts, width):
            scales = slice(at.start // BLOCK, groups(at.stop))
            matrices = q_EHI[:, :, at].contiguous(), s_EBG[:, :, scales]
            out_PH = kernels.grouped(qh_PI[:, at].contiguous(), sh_PG[:, scales], *matrices, plan, torch.float32)
            yield kernels.combine(out_PH, plan, weights_Tk, torch.float32)
        return
    out_PH = kernels.grouped(qh_PI, sh_PG, q_EHI, s_EBG, plan, torch.float32)
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
        quantized = own.backend.quantize_activation(x_TH.to(torch.bfloat16), own.scale_format)
        stacks = own.stacks(gate_up_EFH, down_EHI, last=not any(ctx.needs_input_grad))
        y_TH, saved = run_grouped(kernels, quantized, weights_Tk, ids_Tk, stacks, own.scale_format, split=own.split)
        ctx.save_for_backward(*quantized, *saved[1:], gate_up_EFH, down_EHI, weights_Tk, *saved.plan.tensors())
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
        down = _transposed(kernels, stacks.down, stacks.transposed[1])
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
            gate_up = _transposed(kernels, stacks.gate_up, stacks.transposed[0])
            dx_PH = kernels.grouped(q, s, *gate_up, plan, torch.float32, summed=2)
            dx = kernels.combine(dx_PH, plan, None, written(ctx.x_dtype)).to(ctx.x_dtype)
        if wants_gate_up:
            g = kernels.group_tokens(dab_PF, plan, form)
            x = kernels.regroup(q_TH, s_TG, plan, form, tokens=True)
            dgate_up = kernels.grouped_wgrad(g, x, plan, written(gate_up_EFH.dtype)).to(gate_up_EFH.dtype)
        return dx, dgate_up, ddown, dweights_Tk.to(weights_Tk.dtype), None, None, None


def _transposed(kernels: Any, stack: tuple[Tensor, Tensor], at_hand: Tensor | None) -> tuple[Tensor, Tensor]:
    """Each matrix transposed, with its scales."""
    return kernels.transposed(stack[0]) if at_hand is None else at_hand, stack[1].transpose(1, 2)


def grouped_experts_forward(
    x_TH: Tensor, gate_up_EFH: Tensor, down_EHI: Tensor, weights_Tk: Tensor, ids_Tk: Tensor, own: StackedExperts
) -> Tensor:
    """As ``experts.experts_forward``, for a backend with grouped products."""
    watched = Watched.begin(own, ids_Tk)
    result: Tensor = _Grouped.apply(x_TH, gate_up_EFH, down_EHI, weights_Tk, ids_Tk, own, watched)
    return result
