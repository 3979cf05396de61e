"""``Fp8Linear``: FProp, DGrad and WGrad in FP8, FP8 activations saved for backward.

Formula: Jet-RL (arXiv 2601.14243, section 4); the three GEMMs stand in the table of ``backends.base``.
Shape legend as there. A weight is quantized once per value: over the micro-batches of a step, and for the
weight sync after it, the same bytes are used.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from jetrl_patch.fp8.backends import Backend, get_backend
from jetrl_patch.fp8.formats import ScaleFormat
from jetrl_patch.fp8.quantize import expand_weight_scale


class QuantizedWeight(NamedTuple):
    """e4m3 [N, K], its block scales [ceil(N/128), G] and the same scales per row [N, G]."""

    q: Tensor
    s_blocks: Tensor
    s_rows: Tensor


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
        w_NK = weight.detach().to(torch.bfloat16).contiguous()
        # The key is the content: an optimizer, a checkpoint or an EMA may write by any road.
        key = self.backend.fingerprint(w_NK)
        if key is not None and self._cached is not None and self._cached[0] == key:
            return self._cached[1]
        q, s_blocks = self.backend.quantize_weight(w_NK, self.scale_format)
        result = QuantizedWeight(q, s_blocks, expand_weight_scale(s_blocks, q.shape[0]))
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
        ctx.save_for_backward(q_MK, s_MG, w.q, w.s_blocks)
        ctx.state = state
        ctx.x_dtype, ctx.w_dtype, ctx.b_dtype = x.dtype, weight.dtype, None if bias is None else bias.dtype
        return y_MN.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        q_MK, s_MG, q_NK, s_blocks = ctx.saved_tensors
        state: Fp8State = ctx.state
        grad = grad_outputs[0]
        g_MN = grad.reshape(-1, grad.shape[-1]).to(torch.bfloat16).contiguous()
        dx = dw = db = None
        wanted, dtypes = ctx.needs_input_grad[:2], (ctx.x_dtype, ctx.w_dtype)
        if all(wanted):
            dx, dw = state.backend.gradients(g_MN, q_NK, s_blocks, q_MK, s_MG, state.scale_format, dtypes)
        elif wanted[0]:
            dx = state.backend.dgrad(g_MN, q_NK, s_blocks, state.scale_format, ctx.x_dtype)
        elif wanted[1]:
            dw = state.backend.wgrad(g_MN, q_MK, s_MG, state.scale_format, ctx.w_dtype)
        if dx is not None:
            dx = dx.view(*grad.shape[:-1], -1)
        if ctx.needs_input_grad[2]:
            db = g_MN.float().sum(0).to(ctx.b_dtype)
        return dx, dw, db, None


class Fp8Linear(nn.Linear):
    """``nn.Linear`` whose GEMMs run in FP8. Made by swapping a layer's class in place: parameters, names,
    meta tensors, FSDP and ZeRO see the layer they knew.

    Input [..., K] of any float dtype (quantized from BF16), output [..., N] BF16.
    """

    fp8: Fp8State

    def forward(self, input: Tensor) -> Tensor:
        result: Tensor = _Fp8Matmul.apply(input, self.weight, self.bias, self.fp8)
        return result

    def extra_repr(self) -> str:
        splits = f", splits={self.fp8.splits}" if self.fp8.splits > 1 else ""
        return f"{super().extra_repr()}, fp8={self.fp8.scale_format}, backend={self.fp8.backend_name}{splits}"
