"""``Fp8Linear``: FProp, DGrad and WGrad in FP8, FP8 activations saved for backward.

Formula: Jet-RL (arXiv 2601.14243, section 4); the three GEMMs stand in the table of ``backends.base``.
Shape legend as there. Backward holds the weight itself, as ``F.linear`` does, and takes its bytes again: a sharded
model frees the weight after a layer's forward and gathers it before its backward, and bytes kept in between would
be a whole model in FP8 on every rank.
"""

from __future__ import annotations

import functools
import threading
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from jetrl_patch.fp8 import traced
from jetrl_patch.fp8.backends import Backend, get_backend
from jetrl_patch.fp8.formats import ScaleFormat
from jetrl_patch.fp8.gather import Fp8Gathered, Fp8Shard
from jetrl_patch.fp8.quantize import expand_weight_scale


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """e4m3 [N, K] and its block scales [ceil(N/128), G]."""

    q: Tensor
    s_blocks: Tensor

    @functools.cached_property
    def s_rows(self) -> Tensor:
        """The same scales per row, [N, G]."""
        return expand_weight_scale(self.s_blocks, self.q.shape[0])


@dataclass
class Fp8State:
    """How a layer quantizes, and the last weight it quantized. Not part of the state dict."""

    scale_format: ScaleFormat
    backend_name: str
    #: ranges of K whose partial sums a tensor-parallel rollout adds; 1 unless the layer is row-parallel there
    splits: int = 1
    _cached: tuple[int, QuantizedWeight] | None = field(default=None, repr=False)

    @property
    def backend(self) -> Backend:
        return get_backend(self.backend_name)

    def quantized(self, weight: Tensor) -> QuantizedWeight:
        """The bytes and scales of ``weight`` [N, K], from the cache while its content stands."""
        if isinstance(weight, Fp8Gathered):
            return QuantizedWeight(weight.q, weight.s_blocks)
        if isinstance(weight, Fp8Shard):  # not sharded, or not yet
            return QuantizedWeight(*weight.quantized())
        w_NK = weight.detach().to(torch.bfloat16).contiguous()
        # The key is the content: an optimizer, a checkpoint or an EMA may write by any road.
        key = self.backend.fingerprint(w_NK)
        if key is not None and self._cached is not None and self._cached[0] == key:
            return self._cached[1]
        result = QuantizedWeight(*self.backend.quantize_weight(w_NK, self.scale_format))
        if key is not None:
            self._cached = (key, result)
        return result


class _LastActivation(threading.local):
    """q, k and v (gate and up) read the same tensor: it is quantized and saved once."""

    source: weakref.ref[Tensor] | None = None
    key: tuple[Any, ...] = ()
    value: tuple[Tensor, Tensor] | None = None

    def quantize(self, x: Tensor, x_MK: Tensor, state: Fp8State) -> tuple[Tensor, Tensor]:
        if x.is_inference():  # such tensors have no version to compare
            return state.backend.quantize_activation(x_MK, state.scale_format)
        key = (x._version, state.backend_name, state.scale_format)
        if self.source is not None and self.source() is x and self.key == key and self.value is not None:
            return self.value
        value = state.backend.quantize_activation(x_MK, state.scale_format)
        self.keep(x, value, state)
        return value

    def keep(self, x: Tensor, value: tuple[Tensor, Tensor], state: Fp8State) -> None:
        """Take ``value`` for ``x`` until ``x`` changes, goes away or another tensor is quantized."""
        self.key = (x._version, state.backend_name, state.scale_format)
        self.value = value
        self.source = weakref.ref(x, self._forget)

    def _forget(self, reference: weakref.ref[Tensor]) -> None:
        if self.source is reference:
            self.source = self.value = None


_last_activation = _LastActivation()


def hand_over(x: Tensor, quantized: tuple[Tensor, Tensor], state: Fp8State) -> None:
    """For a producer that quantized ``x`` [..., K] while it made it: the next layers that read it take these bytes.

    ``quantized`` is what ``state.backend.quantize_activation`` gives for ``x`` [M, K], bit for bit.
    """
    if not x.is_inference():  # such tensors have no version to compare
        _last_activation.keep(x, quantized, state)


class _Fp8Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, state: Fp8State) -> Tensor:
        w = state.quantized(weight)
        x_MK = x.reshape(-1, x.shape[-1]).to(torch.bfloat16)
        q_MK, s_MG = _last_activation.quantize(x, x_MK, state)
        y_MN = state.backend.gemm(q_MK, s_MG, w.q, w.s_rows, torch.bfloat16, state.splits)
        if bias is not None:
            y_MN += bias.to(torch.bfloat16)  # after the one rounding, in BF16: the order of the contract
        ctx.save_for_backward(q_MK, s_MG, weight)
        ctx.state = state
        # The parameter that has main_grad: a checkpoint's hooks may hand back another tensor of the same value.
        ctx.parameter = weight if has_main_grad(weight) else None
        ctx.x_dtype, ctx.w_dtype, ctx.b_dtype = x.dtype, weight.dtype, None if bias is None else bias.dtype
        return y_MN.view(*x.shape[:-1], y_MN.shape[1])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        q_MK, s_MG, weight = ctx.saved_tensors
        state: Fp8State = ctx.state
        grad = grad_outputs[0]
        g_MN = grad.reshape(-1, grad.shape[-1]).to(torch.bfloat16).contiguous()
        dx = dw = db = None
        w_dtype = ctx.w_dtype if ctx.parameter is None else torch.float32
        wanted, dtypes = ctx.needs_input_grad[:2], (ctx.x_dtype, w_dtype)
        if wanted[0]:
            w = state.quantized(weight)
        if all(wanted):
            dx, dw = state.backend.gradients(g_MN, w.q, w.s_blocks, q_MK, s_MG, state.scale_format, dtypes)
        elif wanted[0]:
            dx = state.backend.dgrad(g_MN, w.q, w.s_blocks, state.scale_format, ctx.x_dtype)
        elif wanted[1]:
            dw = state.backend.wgrad(g_MN, q_MK, s_MG, state.scale_format, w_dtype)
        if dx is not None:
            dx = dx.view(*grad.shape[:-1], dx.shape[1])
        if dw is not None and ctx.parameter is not None:
            dw = add_to_main_grad(ctx.parameter, dw)
        if ctx.needs_input_grad[2]:
            db = g_MN.float().sum(0).to(ctx.b_dtype)
        return dx, dw, db, None


def _apply(x: Tensor, weight: Tensor, bias: Tensor | None, state: Fp8State) -> Tensor:
    result: Tensor = _Fp8Matmul.apply(x, weight, bias, state)
    return result


_outside_of_graphs = _apply


def keep_gathered_out_of_graphs() -> None:
    """Let layers whose weight is gathered in FP8 break a compiled graph; called where such weights are made.

    Not at import: ``torch.compiler.disable`` loads the whole compiler, and with it a variable into the environment.
    """
    global _outside_of_graphs
    if _outside_of_graphs is _apply:
        _outside_of_graphs = torch.compiler.disable(_apply)


def has_main_grad(weight: Any) -> bool:
    """Does the framework keep an FP32 gradient of this weight to add to (Megatron's ``main_grad``)?

    Megatron-FSDP's parameters are left to their own hooks: there it is made anew in every backward.
    """
    main = getattr(weight, "main_grad", None)
    return isinstance(main, Tensor) and main.dtype == torch.float32 and not hasattr(weight, "__fsdp_param__")


def add_to_main_grad(weight: Any, dw: Tensor) -> Tensor | None:
    """Add an FP32 WGrad [N, K] to ``weight.main_grad`` and say so, as Megatron's fused accumulation does.

    Returns:
        What autograd gets in its place: where hooks look at ``grad_added_to_main_grad``, a gradient that keeps them
        running on the backward thread and whose values nobody reads (zeros under ``zero_out_wgrad``); else None.
    """
    weight.main_grad.add_(dw)
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    make = torch.zeros if getattr(weight, "zero_out_wgrad", False) else torch.empty
    return make(dw.shape, dtype=weight.dtype, device=dw.device)


class Fp8Linear(nn.Linear):
    """``nn.Linear`` whose GEMMs run in FP8. Made by swapping a layer's class in place: parameters, names,
    meta tensors, FSDP and ZeRO see the layer they knew.

    Input [..., K] of any float dtype (quantized from BF16), output [..., N] BF16.
    """

    fp8: Fp8State

    def forward(self, input: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            if isinstance(self.weight, (Fp8Gathered, Fp8Shard)):  # bytes have no gradient that a graph could hold
                return _outside_of_graphs(input, self.weight, self.bias, self.fp8)
            state = self.fp8
            return traced.linear(input, self.weight, self.bias, state.backend_name, state.scale_format, state.splits)
        return _apply(input, self.weight, self.bias, self.fp8)

    def extra_repr(self) -> str:
        splits = f", splits={self.fp8.splits}" if self.fp8.splits > 1 else ""
        return f"{super().extra_repr()}, fp8={self.fp8.scale_format}, backend={self.fp8.backend_name}{splits}"
