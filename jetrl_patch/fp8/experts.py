"""The experts of a mixture in FP8: FProp, DGrad and WGrad of each expert, as ``Fp8Linear`` computes a layer.

    a = x Wg^T,  b = x Wu^T  (BF16)      h = SiLU(a) * b  (BF16)      y = sum over e of w_e * (h Wd^T)  (FP32, see ``mixture``)

Each of an expert's three matrices is quantized in 128x128 blocks of its own, under its name in a checkpoint
(``experts.3.gate_proj``), although transformers keeps all experts in two parameters. A token is quantized once for all its
experts. Backward saves FP8 for the products, BF16 a and b for the activation, and the parameters themselves.

This module computes the experts one by one: the reference, and what a CPU runs. On a GPU ``grouped`` computes them together.

The gradient of a routing weight is the inner product of dy with the expert's output. That output is not saved: with
u = dy Wd, which DGrad computes anyway, <dy, h Wd^T> = <u, h>, and dh = w u.

Shape legend: T tokens, k experts per token, P = T * k pairs, E experts, H hidden size, I intermediate size, G groups of 128,
n tokens of one expert, R parts of the sum over experts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from jetrl_patch.backends import Backend, get_backend
from jetrl_patch.backends.quantize import Quantized, dequantize_activation
from jetrl_patch.config.formats import ScaleFormat
from jetrl_patch.exact.dispatch import implementation
from jetrl_patch.exact.elementwise import silu_mul, silu_mul_gradients
from jetrl_patch.fp8.grouped import Gradients, Saved, Stacks, grouped_backward, run_grouped
from jetrl_patch.fp8.linear import Fp8State, backward_pass
from jetrl_patch.fp8.mixture import (
    WHOLE,
    ExpertSplit,
    Group,
    PlainProducts,
    Watch,
    Watched,
    added,
    groups_of,
    weighted_sums,
)
from jetrl_patch.kernels.formats import FP8, groups
from jetrl_patch.models.structure import PROJECTIONS, Projection

__all__ = ["PROJECTIONS", "ExpertWeights", "Experts", "Matrix", "experts_forward", "run_experts"]


#: a matrix of each expert: a stack [E, …], or one by one
Matrices: TypeAlias = Tensor | Sequence[Tensor]


class Matrix(NamedTuple):
    """One matrix of one expert, as the weight sync sees it: a layer with its state."""

    fp8: Fp8State


class ExpertWeights(NamedTuple):
    """One expert's matrices, with scales per block in the trainer and per row in the rollout."""

    gate: Quantized
    up: Quantized
    down: Quantized


def run_experts(
    x: Quantized,
    weights_Tk: Tensor,
    ids_Tk: Tensor,
    matrices: Callable[[int], ExpertWeights],
    sizes: tuple[int, int],
    backend: Backend,
    saved: Saved | None = None,
    split: ExpertSplit = WHOLE,
    held: range | None = None,
) -> Tensor:
    """FProp of the experts: the trainer's forward and the rollout's.

    Args:
        x: the tokens, e4m3 [T, H] with scales [T, G].
        matrices: gives those of an expert. It is called once, and only for experts with tokens.
        sizes: (E, H).
        saved: filled for backward.
        split: the parts of the sum. A rank of a rollout computes one.
        held: the experts of this rank. None for all.

    Returns:
        The parts of the sum, FP32 [R, T, H], for ``added``.
    """

    outputs = functools.partial(run_expert, x, matrices=matrices, experts=sizes[0], backend=backend, saved=saved, split=split)
    return weighted_sums(ids_Tk, weights_Tk, sizes, outputs, split.ranks, held)


def run_expert(
    x: Quantized,
    group: Group,
    matrices: Callable[[int], ExpertWeights],
    experts: int,
    backend: Backend,
    saved: Saved | None,
    split: ExpertSplit,
) -> Iterator[tuple[int, Tensor]]:
    """FProp of one expert of ``experts``. Yields the parts that it adds to, with what it adds before the routing weight."""
    w, tokens = matrices(group.expert), x.rows(group.tokens)
    a_nI, b_nI = (backend.gemm(tokens, matrix, torch.bfloat16) for matrix in (w.gate, w.up))
    h, width = backend.quantize_activation(silu_mul(a_nI, b_nI), x.scale_format), a_nI.shape[1]
    if saved is not None:
        saved.ab_PF[group.span, :width] = a_nI
        saved.ab_PF[group.span, width:] = b_nI
        saved.h.q[group.span], saved.h.s[group.span] = h
    for part, at in split.places(group.expert, experts, width):
        whole = at.stop - at.start == width
        left, right = (h, w.down) if whole else (m.columns(at.start, at.stop) for m in (h, w.down))
        yield part, backend.gemm(left, right, torch.float32)


def space_for(pairs: int, like_TH: Tensor, inner: int, own: Experts) -> Saved:
    """What backward needs of this many pairs, empty."""
    stored = FP8 if own.plain is None else torch.bfloat16
    kinds = ((2 * inner, torch.bfloat16), (inner, stored), (groups(inner), torch.float32))
    ab_PF, qh_PI, sh_PG = (like_TH.new_empty(pairs, width, dtype=dtype) for width, dtype in kinds)
    return Saved(ab_PF, Quantized(qh_PI, sh_PG, "rows", own.scale_format))


@dataclass
class Experts:
    """The quantization settings of a layer's experts, and their last quantized weights. Not part of the state dict.

    Attributes:
        split: the rollout's.
        plain: the products of experts in BF16, which have no quantized weights. None in FP8.
        watch: sees the next forward that autograd records, and its backward; see ``mixture.Watched``.
    """

    count: int
    scale_format: ScaleFormat
    backend_name: str
    split: ExpertSplit = WHOLE
    plain: PlainProducts | None = field(default=None, repr=False)
    watch: Watch | None = field(default=None, repr=False)
    _matrices: dict[tuple[int, Projection], Matrix] = field(default_factory=dict, repr=False)
    _stacks: tuple[Fp8State, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if self.plain is not None:
            return
        self._stacks = tuple(Fp8State(self.scale_format, self.backend_name) for _ in range(2))
        for expert in range(self.count):
            for part in PROJECTIONS:
                self._matrices[expert, part] = Matrix(Fp8State(self.scale_format, self.backend_name))

    @property
    def backend(self) -> Backend:
        return self.plain or get_backend(self.backend_name)

    def to_bf16(self, exact: bool) -> None:
        """Leave FP8 for good, and drop what was quantized."""
        self.plain, self.watch = PlainProducts(exact), None
        self._matrices.clear()
        self._stacks = ()

    def matrices(self) -> Iterator[tuple[str, Matrix]]:
        """Yield each matrix with its name in the layer, such as ``3.gate_proj``."""
        for (expert, part), matrix in self._matrices.items():
            yield f"{expert}.{part}", matrix

    def states(self) -> Iterator[Fp8State]:
        """Yield everything that may hold quantized weights."""
        yield from (matrix.fp8 for matrix in self._matrices.values())
        yield from self._stacks

    def stacks(self, gate_up_EFH: Tensor, down_EHI: Tensor, last: bool = False, made_in: int | None = None) -> Stacks:
        """The bytes and scales of all experts in two stacks, equal to those of ``quantized``."""
        weights = (gate_up_EFH.unflatten(1, (2, -1)).flatten(0, 1), down_EHI)
        pairs = zip(self._stacks, weights, strict=True)
        gate_up, down = (state.quantized(weight, own=True, last=last, made_in=made_in) for state, weight in pairs)
        return Stacks(gate_up, down)

    def quantized(
        self, expert: int, gate_up_EFH: Matrices, down_EHI: Matrices, last: bool = False, made_in: int | None = None
    ) -> ExpertWeights:
        """The bytes and scales of one expert. ``last`` and ``made_in`` as in ``Fp8State.quantized``."""
        gate_up_FH, down_HI = gate_up_EFH[expert], down_EHI[expert]
        weights = (*gate_up_FH.split(down_HI.shape[1]), down_HI)
        if self.plain is not None:
            return ExpertWeights(*(self.plain.quantize_weight(w, self.scale_format) for w in weights))
        pairs = zip((self._matrices[expert, part].fp8 for part in PROJECTIONS), weights, strict=True)
        found = (state.quantized(weight, own=True, last=last, made_in=made_in) for state, weight in pairs)
        return ExpertWeights(*found)


class _Mixture(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TH: Tensor,
        gate_up_EFH: Tensor,
        down_EHI: Tensor,
        weights_Tk: Tensor,
        ids_Tk: Tensor,
        own: Experts,
        watched: Watched | None,
    ) -> Tensor:
        backend, masters, form = own.backend, (gate_up_EFH, down_EHI), own.scale_format
        kernels = backend.grouped(x_TH)
        x = backend.quantize_activation(x_TH.to(torch.bfloat16), form)
        last = not any(ctx.needs_input_grad)
        if kernels is not None:
            stacks = own.stacks(*masters, last)
            y_TH, plan, saved = run_grouped(kernels, x, weights_Tk, ids_Tk, stacks, own.split)
            routes = plan.tensors()
        else:
            (E, H, I), routes = down_EHI.shape, (ids_Tk,)
            saved = space_for(ids_Tk.numel(), x_TH, I, own)
            matrices = functools.partial(own.quantized, gate_up_EFH=gate_up_EFH, down_EHI=down_EHI, last=last)
            y_TH = added(run_experts(x, weights_Tk, ids_Tk, matrices, (E, H), backend, saved, own.split))
        ctx.save_for_backward(*x, saved.ab_PF, *saved.h, *masters, weights_Tk, *routes)
        ctx.own, ctx.x_dtype, ctx.watched, ctx.made_in = own, x_TH.dtype, watched, backward_pass()
        if watched is not None:
            watched.forward(x_TH, *saved.ab_PF.chunk(2, 1))
        return y_TH

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        q_TH, s_TG, ab_PF, qh_PI, sh_PG, gate_up_EFH, down_EHI, weights_Tk, *routes = ctx.saved_tensors
        own: Experts = ctx.own
        form, masters = own.scale_format, (gate_up_EFH, down_EHI)
        x, saved = Quantized(q_TH, s_TG, "rows", form), Saved(ab_PF, Quantized(qh_PI, sh_PG, "rows", form))
        dy_TH, dtypes = grad_outputs[0].to(torch.bfloat16), (ctx.x_dtype, gate_up_EFH.dtype, down_EHI.dtype)
        wanted = [dtype if wants else None for dtype, wants in zip(dtypes, ctx.needs_input_grad)]
        kernels = own.backend.grouped(q_TH)
        if kernels is not None:
            stacks = own.stacks(*masters, last=True, made_in=ctx.made_in)
            found = grouped_backward(kernels, dy_TH, x, saved, stacks, weights_Tk, kernels.Plan.of(routes), wanted)
        else:
            matrices = functools.partial(
                own.quantized, gate_up_EFH=gate_up_EFH, down_EHI=down_EHI, last=True, made_in=ctx.made_in
            )
            dab_PF = None if ctx.watched is None else torch.empty_like(ab_PF)
            found = run_backward(own.backend, dy_TH, x, saved, matrices, weights_Tk, routes[0], masters, wanted, dab_PF)
        if ctx.watched is not None and found.dab_PF is not None:
            ctx.watched.backward(dy_TH, *found.dab_PF.chunk(2, 1))
        return *found[:3], found.dweights_Tk.to(weights_Tk.dtype), None, None, None


def run_backward(
    backend: Backend,
    dy_TH: Tensor,
    x: Quantized,
    saved: Saved,
    matrices: Callable[[int], ExpertWeights],
    weights_Tk: Tensor,
    ids_Tk: Tensor,
    masters: tuple[Matrices, Matrices],
    wanted: Sequence[torch.dtype | None],
    dab_PF: Tensor | None = None,
    held: range | None = None,
    experts: int | None = None,
) -> Gradients:
    """As ``grouped_backward``. ``masters`` are the parameters of gate and up, and of down. Fills ``dab_PF`` if it is given.

    With ``held``, some of the layer's ``experts``, the parameters and ``saved`` are theirs.
    """
    shapes = (dy_TH.shape, *((len(master), *master[0].shape) for master in masters))
    dx, dgate_up, ddown = (
        torch.zeros(shape, dtype=dtype, device=dy_TH.device) if wants else None
        for shape, dtype, wants in zip(shapes, (torch.float32, *wanted[1:]), wanted)
    )
    dweights_Tk = torch.zeros(weights_Tk.shape, dtype=torch.float32, device=dy_TH.device)
    (E, _, I), first = shapes[2], 0 if held is None else held.start
    for number, tokens, slots, at in groups_of(ids_Tk, experts or E, held):
        expert = number - first
        w, h, (a_nI, b_nI) = matrices(number), saved.h.rows(at), saved.ab_PF[at].chunk(2, 1)
        dy_nH, weight_n1 = dy_TH[tokens], weights_Tk[tokens, slots].float().unsqueeze(-1)
        u_nI = backend.dgrad(dy_nH, w.down, torch.float32)
        dweights_Tk[tokens, slots] = (u_nI * dequantize_activation(*h)).sum(-1)
        if ddown is not None:
            ddown[expert] = backend.wgrad((weight_n1 * dy_nH).to(torch.bfloat16), h, ddown.dtype)
        dh_nI, triton = (weight_n1 * u_nI).to(torch.bfloat16), implementation(a_nI) == "triton"
        da_nI, db_nI = silu_mul_gradients(a_nI, b_nI, dh_nI, (a_nI.dtype, b_nI.dtype), triton)
        if dab_PF is not None:
            dab_PF[at, :I], dab_PF[at, I:] = da_nI, db_nI
        if dx is not None:
            dx_nH = backend.dgrad(da_nI, w.gate, torch.float32) + backend.dgrad(db_nI, w.up, torch.float32)
            dx.index_add_(0, tokens, dx_nH)
        if dgate_up is not None:
            own_x = x.rows(tokens)
            dgate_up[expert, :I] = backend.wgrad(da_nI, own_x, dgate_up.dtype)
            dgate_up[expert, I:] = backend.wgrad(db_nI, own_x, dgate_up.dtype)
    return Gradients(None if dx is None else dx.to(wanted[0]), dgate_up, ddown, dweights_Tk, dab_PF)


def experts_forward(
    x_TH: Tensor, gate_up_EFH: Tensor, down_EHI: Tensor, weights_Tk: Tensor, ids_Tk: Tensor, own: Experts
) -> Tensor:
    """The experts of a layer on the tokens routed to them.

    Args:
        x_TH: tokens [T, H] of any float dtype, computed from their BF16 value.
        gate_up_EFH: gate and up of each expert, [E, 2I, H]. down_EHI: [E, H, I].
        weights_Tk: routing weights [T, k]. ids_Tk: indices of the experts, int64, different within a token.

    Returns:
        BF16 [T, H]. Gradients flow to the tokens, both parameters and the routing weights.
    """
    watched = None
    if own.watch is not None and torch.is_grad_enabled() and ids_Tk.numel() and not torch.compiler.is_compiling():
        watched, own.watch = Watched(own.watch, ids_Tk), None
    result: Tensor = _Mixture.apply(x_TH, gate_up_EFH, down_EHI, weights_Tk, ids_Tk, own, watched)
    return result
