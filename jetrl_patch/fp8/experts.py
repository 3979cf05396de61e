"""The experts of a mixture in FP8: FProp, DGrad and WGrad of each expert, as ``Fp8Linear`` computes a layer.

    a = x Wg^T,  b = x Wu^T  (BF16)      h = SiLU(a) * b  (BF16)      y = sum over e of w_e * (h Wd^T)  (FP32, see ``mixture``)

Each of an expert's three matrices is quantized in 128x128 blocks of its own, as its checkpoint names it
(``experts.3.gate_proj``), although transformers keeps all experts in two parameters. A token is quantized once for all its
experts. Backward saves FP8 for the products, BF16 a and b for the activation, and the parameters themselves.

This module computes the experts one by one, as the reference and on a CPU. On a GPU ``grouped`` computes them together.

The gradient of a routing weight is the inner product of dy with the expert's output. That output is not saved: with
u = dy Wd, which DGrad computes anyway, <dy, h Wd^T> = <u, h>, and dh = w u.

Shape legend: T tokens, k experts per token, P = T * k pairs, E experts, H hidden size, I intermediate size, G groups of 128,
n tokens of one expert, R parts of the sum over experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from jetrl_patch.backends import Backend, get_backend
from jetrl_patch.backends.quantize import Quantized, dequantize_activation
from jetrl_patch.exact.elementwise import silu_mul
from jetrl_patch.fp8.grouped import Saved, Stacks, grouped_experts_forward
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
from jetrl_patch.kernels.formats import FP8, ScaleFormat, groups
from jetrl_patch.models.structure import PARTS, Part

__all__ = ["PARTS", "ExpertWeights", "Experts", "Matrix", "experts_forward", "run_experts"]


class Matrix(NamedTuple):
    """One matrix of one expert, as the weight sync names and quantizes it."""

    fp8: Fp8State


class ExpertWeights(NamedTuple):
    """One expert's matrices: in blocks in the trainer, with scales per row in the rollout."""

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
        matrices: those of an expert, asked for once and only if it has tokens.
        sizes: (E, H).
        saved: filled for backward.
        split: the parts of the sum. A rank of a rollout computes one.
        held: the experts of this rank; None for all.

    Returns:
        The parts of the sum, FP32 [R, T, H], for ``added``.
    """

    def outputs(group: Group) -> Iterator[tuple[int, Tensor]]:
        w, tokens = matrices(group.expert), x.rows(group.tokens)
        a_nI, b_nI = (backend.gemm(tokens, matrix, torch.bfloat16) for matrix in (w.gate, w.up))
        h, width = backend.quantize_activation(silu_mul(a_nI, b_nI), x.scale_format), a_nI.shape[1]
        if saved is not None:
            saved.ab_PF[group.span, :width] = a_nI
            saved.ab_PF[group.span, width:] = b_nI
            saved.h.q[group.span], saved.h.s[group.span] = h
        for part, at in split.places(group.expert, sizes[0], width):
            whole = at.stop - at.start == width
            left, right = (h, w.down) if whole else (m.columns(at.start, at.stop) for m in (h, w.down))
            yield part, backend.gemm(left, right, torch.float32)

    return weighted_sums(ids_Tk, weights_Tk, sizes, outputs, split.ranks, held)


@dataclass
class Experts:
    """The quantization settings of a layer's experts, and their last quantized weights. Not part of the state dict.

    Attributes:
        split: the rollout's.
        plain: the products of experts in BF16, which have no quantized weights; None in FP8.
        watch: sees the next forward that autograd records, and its backward; see ``mixture.Watched``.
    """

    count: int
    scale_format: ScaleFormat
    backend_name: str
    split: ExpertSplit = WHOLE
    plain: PlainProducts | None = field(default=None, repr=False)
    watch: Watch | None = field(default=None, repr=False)
    _matrices: dict[tuple[int, Part], Matrix] = field(default_factory=dict, repr=False)
    _stacks: tuple[Fp8State, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if self.plain is not None:
            return
        self._stacks = tuple(Fp8State(self.scale_format, self.backend_name) for _ in range(2))
        for expert in range(self.count):
            for part in PARTS:
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
        """Yield each matrix with its name below the layer: ``3.gate_proj``."""
        for (expert, part), matrix in self._matrices.items():
            yield f"{expert}.{part}", matrix

    def states(self) -> Iterator[Fp8State]:
        """Yield everything that may hold quantized weights."""
        yield from (matrix.fp8 for matrix in self._matrices.values())
        yield from self._stacks

    def stacks(self, gate_up_EFH: Tensor, down_EHI: Tensor, last: bool = False, made_in: int | None = None) -> Stacks:
        """The bytes and scales of all experts in two stacks, the same as those of ``quantized``."""
        weights = (gate_up_EFH.unflatten(1, (2, -1)).flatten(0, 1), down_EHI)
        pairs = zip(self._stacks, weights, strict=True)
        gate_up, down = (state.quantized(weight, own=True, last=last, made_in=made_in) for state, weight in pairs)
        return Stacks(gate_up, down)

    def quantized(
        self, expert: int, gate_up_EFH: Tensor, down_EHI: Tensor, last: bool = False, made_in: int | None = None
    ) -> ExpertWeights:
        """The bytes and scales of one expert. ``last`` and ``made_in`` are those of ``Fp8State.quantized``."""
        width = down_EHI.shape[2]
        weights = (gate_up_EFH[expert, :width], gate_up_EFH[expert, width:], down_EHI[expert])
        if self.plain is not None:
            return ExpertWeights(*(self.plain.quantize_weight(w, self.scale_format) for w in weights))
        pairs = zip((self._matrices[expert, part].fp8 for part in PARTS), weights, strict=True)
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
        backend, (E, H, I), form, P = own.backend, down_EHI.shape, own.scale_format, ids_Tk.numel()
        x = backend.quantize_activation(x_TH.to(torch.bfloat16), form)
        stored = FP8 if own.plain is None else torch.bfloat16
        kinds = ((2 * I, torch.bfloat16), (I, stored), (groups(I), torch.float32))
        ab_PF, qh_PI, sh_PG = (x_TH.new_empty(P, width, dtype=dtype) for width, dtype in kinds)
        saved = Saved(ab_PF, Quantized(qh_PI, sh_PG, "rows", form))
        last = not any(ctx.needs_input_grad)

        def matrices(expert: int) -> ExpertWeights:
            return own.quantized(expert, gate_up_EFH, down_EHI, last)

        parts_RTH = run_experts(x, weights_Tk, ids_Tk, matrices, (E, H), backend, saved, own.split)
        ctx.save_for_backward(*x, ab_PF, *saved.h, gate_up_EFH, down_EHI, weights_Tk, ids_Tk)
        ctx.own, ctx.x_dtype, ctx.watched, ctx.made_in = own, x_TH.dtype, watched, backward_pass()
        if watched is not None:
            watched.forward(x_TH, *ab_PF.chunk(2, 1))
        return added(parts_RTH)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        q_TH, s_TG, ab_PF, qh_PI, sh_PG, gate_up_EFH, down_EHI, weights_Tk, ids_Tk = ctx.saved_tensors
        own: Experts = ctx.own
        backend, form, (E, _, I) = own.backend, own.scale_format, down_EHI.shape
        x, saved_h = Quantized(q_TH, s_TG, "rows", form), Quantized(qh_PI, sh_PG, "rows", form)
        a_PI, b_PI = ab_PF.chunk(2, 1)
        dy_TH = grad_outputs[0].to(torch.bfloat16)
        wants_x, wants_gate_up, wants_down = ctx.needs_input_grad[:3]
        dx_TH = torch.zeros(dy_TH.shape, dtype=torch.float32, device=dy_TH.device) if wants_x else None
        dgate_up = torch.zeros_like(gate_up_EFH) if wants_gate_up else None
        ddown = torch.zeros_like(down_EHI) if wants_down else None
        dweights_Tk = torch.zeros(weights_Tk.shape, dtype=torch.float32, device=dy_TH.device)
        through: list[tuple[Tensor, Tensor]] = []
        for group in groups_of(ids_Tk, E):
            at, tokens, expert = group.span, group.tokens, group.expert
            w = own.quantized(expert, gate_up_EFH, down_EHI, last=True, made_in=ctx.made_in)
            dy_nH, weight_n1 = dy_TH[tokens], weights_Tk[tokens, group.slots].float().unsqueeze(-1)
            h = saved_h.rows(at)
            u_nI = backend.dgrad(dy_nH, w.down, torch.float32)
            dweights_Tk[tokens, group.slots] = (u_nI * dequantize_activation(*h)).sum(-1)
            if ddown is not None:
                weighted_nH = (weight_n1 * dy_nH).to(torch.bfloat16)
                ddown[expert] = backend.wgrad(weighted_nH, h, ddown.dtype)
            da_nI, db_nI = _through_activation(a_PI[at], b_PI[at], (weight_n1 * u_nI).to(torch.bfloat16))
            if ctx.watched is not None:
                through.append((da_nI, db_nI))
            if dx_TH is not None:
                dx_nH = backend.dgrad(da_nI, w.gate, torch.float32)
                dx_nH = dx_nH + backend.dgrad(db_nI, w.up, torch.float32)
                dx_TH.index_add_(0, tokens, dx_nH)
            if dgate_up is not None:
                own_x = x.rows(tokens)
                dgate_up[expert, :I] = backend.wgrad(da_nI, own_x, dgate_up.dtype)
                dgate_up[expert, I:] = backend.wgrad(db_nI, own_x, dgate_up.dtype)
        if ctx.watched is not None and through:
            ctx.watched.backward(dy_TH, *(torch.cat(parts) for parts in zip(*through, strict=True)))
        dx = None if dx_TH is None else dx_TH.to(ctx.x_dtype)
        return dx, dgate_up, ddown, dweights_Tk.to(weights_Tk.dtype), None, None, None


def _through_activation(a_nI: Tensor, b_nI: Tensor, dh_nI: Tensor) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        a, b = a_nI.detach().requires_grad_(), b_nI.detach().requires_grad_()
        h = silu_mul(a, b)
    da, db = torch.autograd.grad(h, (a, b), dh_nI)
    return da, db


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
    if own.backend.grouped(x_TH) is not None:
        return grouped_experts_forward(x_TH, gate_up_EFH, down_EHI, weights_Tk, ids_Tk, own)
    watched = Watched.begin(own, ids_Tk)
    result: Tensor = _Mixture.apply(x_TH, gate_up_EFH, down_EHI, weights_Tk, ids_Tk, own, watched)
    return result
