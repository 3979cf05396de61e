"""``Fp8Linear``: FProp, DGrad and WGrad in FP8, with FP8 activations saved for backward.

Formula: Jet-RL (arXiv 2601.14243, section 4). The table in ``backends.base`` gives the three GEMMs and the shape legend.
Autograd saves the weight itself, as ``F.linear`` does, and backward asks for its FP8 bytes again: a sharded model frees
the weight after a layer's forward and gathers it before its backward, so bytes kept in between would add up to a whole
FP8 model on every rank.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from jetrl_patch.backends import Backend, get_backend
from jetrl_patch.backends.quantize import QuantizedWeight
from jetrl_patch.fp8 import traced
from jetrl_patch.fp8.gather import Fp8Gathered, Fp8Shard
from jetrl_patch.kernels.formats import HANDED, Regrouped, ScaleFormat


@dataclass(frozen=True, eq=False)
class Promise:
    """That weights stay as they are (``unchanged``); ``gradients``: backward passes read them too."""

    gradients: bool


#: the promises that hold now. A copy of a state, here or in another process, has a copy, which is none of them.
PROMISES: set[Promise] = set()


def backward_pass() -> int | None:
    """The number of the backward pass that this thread runs, which no other pass has; None outside of one."""
    number = torch._C._current_graph_task_id()
    return None if number == -1 else number


@dataclass
class Fp8State:
    """A layer's quantization settings and its last quantized weight. Not part of the state dict."""

    scale_format: ScaleFormat
    backend_name: str
    #: ranges of K whose FP32 sums a tensor-parallel rollout adds in order; 1 unless in exact mode, in a layer row-parallel there
    splits: int = 1
    _cached: tuple[int, QuantizedWeight] | None = field(default=None, repr=False)
    #: the promise that the layer's own weight stays as it is (``unchanged``)
    promise: Promise | None = field(default=None, repr=False)
    #: what is told whether a kept weight still is the weight, as a flag on its device (``unchanged``)
    audit: Callable[[Tensor], None] | None = field(default=None, repr=False)
    _kept: tuple[tuple[Any, ...], QuantizedWeight] | None = field(default=None, repr=False)

    @property
    def backend(self) -> Backend:
        return get_backend(self.backend_name)

    def promised(self, promise: Promise | None) -> None:
        """Start to rely on a promise, or stop with None. What was kept is dropped."""
        self.promise, self.audit, self._kept = promise, None, None

    def quantized(self, weight: Tensor, own: bool = False, last: bool = False, made_in: int | None = None) -> QuantizedWeight:
        """The bytes and scales of ``weight`` [N, K], cached while its content is unchanged.

        The layer's own weight is kept while a promise holds, and from a recomputation to the gradients that it is for: nothing
        writes a weight between the two, and a sharded model frees it only after them.

        Args:
            own: it is the layer's weight and not, for example, one that LoRA changed.
            last: this backward pass does not read it again.
            made_in: the backward pass in which the graph that asks was made, by checkpointing that nests one pass in another.
        """
        if isinstance(weight, Fp8Gathered):
            return QuantizedWeight(weight.q, weight.s_blocks)
        if isinstance(weight, Fp8Shard):  # not sharded, or not yet
            return QuantizedWeight(*weight.quantized())
        promise = self.promise if self.promise in PROMISES else None
        since = promise or (backward_pass() if made_in is None else made_in)
        if not own or since is None or weight.is_inference():  # inference tensors have no version
            return self._of_content(weight)
        key, kept = (since, weight._version, weight.shape, weight.dtype, weight.device), self._kept
        if kept is None or kept[0] != key:
            kept = key, self._of_content(weight, transposed=promise is not None and promise.gradients)
        elif last and self.audit is not None and backward_pass() is not None:
            self.audit(_differ(kept[1], self._of_content(weight)))
        self._kept = kept if promise is not None or not last else None
        return kept[1]

    def _of_content(self, weight: Tensor, transposed: bool = False) -> QuantizedWeight:
        w_NK = weight.detach().to(torch.bfloat16).contiguous()
        # The key is the content: an optimizer, a checkpoint or an EMA may write in ways that leave no other trace.
        key = self.backend.fingerprint(w_NK)
        if key is not None and self._cached is not None and self._cached[0] == key:
            return self._cached[1]
        both = transposed and self.backend.reads_transposed
        quantize = self.backend.quantize_weight_transposed if both else self.backend.quantize_weight
        result = QuantizedWeight(*quantize(w_NK, self.scale_format))
        if key is not None:
            self._cached = (key, result)
        return result


def _differ(a: QuantizedWeight, b: QuantizedWeight) -> Tensor:
    """Whether any bit differs, as a tensor on the device: nothing waits for it."""
    bytes_differ = (a.q.view(torch.uint8) != b.q.view(torch.uint8)).any()
    return bytes_differ | (a.s_blocks.view(torch.int32) != b.s_blocks.view(torch.int32)).any()


class Read(NamedTuple):
    """A quantized input: e4m3 [M, K], scales [M, G], and what the layers that read it share in backward."""

    q_MK: Tensor
    s_MG: Tensor
    shared: Regrouped


class _LastActivation(threading.local):
    """The last quantized input: q, k and v (or gate and up) read the same tensor, so it is quantized and saved once."""

    source: weakref.ref[Tensor] | None = None
    key: tuple[Any, ...] = ()
    value: Read | None = None

    def quantize(self, x: Tensor, x_MK: Tensor, state: Fp8State) -> Read:
        if x.is_inference():  # inference tensors have no version to compare
            return Read(*state.backend.quantize_activation(x_MK, state.scale_format), Regrouped())
        key = (x._version, state.backend_name, state.scale_format)
        if self.source is not None and self.source() is x and self.key == key and self.value is not None:
            return self.value
        value = Read(*state.backend.quantize_activation(x_MK, state.scale_format), Regrouped())
        self.keep(x, value, state)
        return value

    def keep(self, x: Tensor, value: Read, state: Fp8State) -> None:
        """Cache ``value`` for ``x`` until ``x`` changes or is freed, or another tensor is quantized."""
        self.key = (x._version, state.backend_name, state.scale_format)
        self.value = value
        self.source = weakref.ref(x, self._forget)

    def _forget(self, reference: weakref.ref[Tensor]) -> None:
        if self.source is reference:
            self.source = self.value = None


_last_activation = _LastActivation()


def hand_over(x: Tensor, quantized: tuple[Tensor, Tensor], state: Fp8State) -> None:
    """Pass on the bytes of ``x`` [..., K], which its producer quantized, to the layers that read ``x`` next.

    ``quantized`` must equal ``state.backend.quantize_activation`` of ``x`` as [M, K], bit for bit.
    """
    if not x.is_inference():  # inference tensors have no version to compare
        _last_activation.keep(x, Read(*quantized, Regrouped()), state)


def fprop(x: Tensor, w: QuantizedWeight, bias: Tensor | None, state: Fp8State) -> tuple[Tensor, Read]:
    """Y BF16 [..., N] of x [..., K] and a weight [N, K], and what backward needs of x."""
    x_MK = x.reshape(-1, x.shape[-1]).to(torch.bfloat16)
    read = _last_activation.quantize(x, x_MK, state)
    y_MN = state.backend.product(read.q_MK, read.s_MG, w, torch.bfloat16, state.splits)
    if bias is not None:
        y_MN += bias.to(torch.bfloat16)  # in BF16, after the single rounding: the contract fixes this order
    return y_MN.view(*x.shape[:-1], y_MN.shape[1]), read


class _Fp8Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, state: Fp8State) -> Tensor:
        # Without DGrad, backward does not ask for the bytes of a recomputation.
        y, read = fprop(x, state.quantized(weight, own=True, last=not ctx.needs_input_grad[0]), bias, state)
        ctx.save_for_backward(read.q_MK, read.s_MG, weight)
        ctx.shared = read.shared.add_reader(state) if ctx.needs_input_grad[1] else None
        ctx.state, ctx.made_in = state, backward_pass()
        # Keep the parameter that has main_grad: activation checkpointing may unpack another tensor of equal value.
        ctx.parameter = weight if has_main_grad(weight) else None
        ctx.x_dtype, ctx.w_dtype, ctx.b_dtype = x.dtype, weight.dtype, None if bias is None else bias.dtype
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        q_MK, s_MG, weight = ctx.saved_tensors
        state: Fp8State = ctx.state
        grad = grad_outputs[0]
        both = HANDED.take(grad, state.backend_name, state.scale_format)
        g_MN = grad.reshape(-1, grad.shape[-1]).to(torch.bfloat16).contiguous()
        dx = dw = db = None
        main = None if ctx.parameter is None else ctx.parameter.main_grad
        wanted, dtypes = ctx.needs_input_grad[:2], (ctx.x_dtype, ctx.w_dtype)
        if wanted[0]:
            w = state.quantized(weight, own=True, last=True, made_in=ctx.made_in)
        if all(wanted):
            saved = q_MK, s_MG, state.scale_format
            dx, dw = state.backend.gradients(g_MN, w.q, w.s_blocks, *saved, dtypes, ctx.shared, main, both, w.transposed)
        elif wanted[0]:
            dx = state.backend.dgrad(g_MN, w.q, w.s_blocks, state.scale_format, ctx.x_dtype, w.transposed)
        elif wanted[1]:
            dw = state.backend.weight_gradient(g_MN, q_MK, s_MG, state.scale_format, ctx.w_dtype, ctx.shared, main)
        if dx is not None:
            dx = dx.view(*grad.shape[:-1], dx.shape[1])
        if wanted[1] and ctx.parameter is not None:
            dw = added_to_main_grad(ctx.parameter)
        if ctx.needs_input_grad[2]:
            db = g_MN.sum(0, dtype=torch.float32).to(ctx.b_dtype)
        return dx, dw, db, None


def _apply(x: Tensor, weight: Tensor, bias: Tensor | None, state: Fp8State) -> Tensor:
    result: Tensor = _Fp8Matmul.apply(x, weight, bias, state)
    return result


_outside_of_graphs = _apply


def keep_gathered_out_of_graphs() -> None:
    """Make layers with an FP8-gathered weight break the compiled graph. Called when such weights are created.

    Not done at import: ``torch.compiler.disable`` loads the whole compiler, which sets an environment variable.
    """
    global _outside_of_graphs
    if _outside_of_graphs is _apply:
        _outside_of_graphs = torch.compiler.disable(_apply)


def has_main_grad(weight: Any) -> bool:
    """Whether the framework accumulates this weight's gradient in FP32 (Megatron's ``main_grad``).

    Megatron-FSDP's parameters do not count: it creates ``main_grad`` anew in every backward, and its own hooks fill it.
    """
    main = getattr(weight, "main_grad", None)
    return isinstance(main, Tensor) and main.dtype == torch.float32 and not hasattr(weight, "__fsdp_param__")


def added_to_main_grad(weight: Any) -> Tensor | None:
    """Say that ``weight.main_grad`` holds the WGrad: set its flag, as Megatron's fused accumulation does.

    Returns:
        The gradient for autograd. For a weight with ``grad_added_to_main_grad``, a dummy that makes the hooks run on
        the backward thread and whose values nobody reads (zeros under ``zero_out_wgrad``); otherwise None.
    """
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    make = torch.zeros if getattr(weight, "zero_out_wgrad", False) else torch.empty
    return make(weight.main_grad.shape, dtype=weight.dtype, device=weight.main_grad.device)


class Fp8Linear(nn.Linear):
    """``nn.Linear`` whose GEMMs run in FP8.

    Created by changing a layer's class in place, so parameters, names, meta tensors, FSDP and ZeRO are unaffected.

    Input [..., K] of any float dtype (quantized from BF16), output [..., N] BF16.
    """

    fp8: Fp8State

    def forward(self, input: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            if isinstance(self.weight, (Fp8Gathered, Fp8Shard)):  # a graph cannot hold the gradient of bytes
                return _outside_of_graphs(input, self.weight, self.bias, self.fp8)
            state = self.fp8
            return traced.linear(input, self.weight, self.bias, state.backend_name, state.scale_format, state.splits)
        return _apply(input, self.weight, self.bias, self.fp8)

    def extra_repr(self) -> str:
        splits = f", splits={self.fp8.splits}" if self.fp8.splits > 1 else ""
        return f"{super().extra_repr()}, fp8={self.fp8.scale_format}, backend={self.fp8.backend_name}{splits}"
