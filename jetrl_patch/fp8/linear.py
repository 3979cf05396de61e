"""``Fp8Linear``: FProp, DGrad and WGrad in FP8, with FP8 activations saved for backward.

Formula: Jet-RL (arXiv 2601.14243, section 4). The table in ``backends.base`` gives the three GEMMs and the shape legend.

Autograd saves the weight itself, as ``F.linear`` does, and backward quantizes it again. A sharded model frees a weight after
the layer's forward and gathers it for the backward. FP8 bytes kept in between would add up to a whole FP8 model on every rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from jetrl_patch.backends import Backend, get_backend
from jetrl_patch.backends.base import BothLayouts
from jetrl_patch.backends.quantize import Quantized, Regrouped
from jetrl_patch.config.formats import FORMATS, ScaleFormat
from jetrl_patch.fp8.gather import Fp8Gathered, Fp8Shard
from jetrl_patch.fp8.parallel import RowRanks
from jetrl_patch.kernels.formats import groups
from jetrl_patch.patching.attached import Attached


@dataclass(frozen=True, eq=False)
class Promise:
    """A promise that weights do not change (``unchanged``). ``gradients``: backward passes will read them too."""

    gradients: bool


#: the promises that hold now. A copied state, here or in another process, has a copy of its promise, which is not in the set.
PROMISES: set[Promise] = set()


def backward_pass() -> int | None:
    """The unique number of the backward pass that this thread runs, or None."""
    number = torch._C._current_graph_task_id()
    return None if number == -1 else number


@dataclass(eq=False)
class LastInput:
    """The last quantized input of the layers of one module: q, k and v (or gate and up) read the same tensor.

    It is quantized and saved once. An operation before them may have quantized it already (``keep``). Copies are empty.
    """

    _source: weakref.ref[Tensor] | None = None
    _key: tuple[Any, ...] = ()
    _value: Quantized | None = None

    def __reduce__(self) -> tuple[type[LastInput], tuple[()]]:
        return LastInput, ()

    def quantize(self, x: Tensor, x_MK: Tensor, state: Fp8State) -> Quantized:
        """The bytes of ``x`` [..., K], which is also given as BF16 [M, K]."""
        held = self._source is not None and self._source() is x and self._key == self._key_of(x, state)
        if held and self._value is not None:
            return self._value
        value = state.backend.quantize_activation(x_MK, state.scale_format)
        self.keep(x, value, state)
        return value

    def keep(self, x: Tensor, value: Quantized, state: Fp8State) -> None:
        """Hold ``value`` for ``x`` until ``x`` changes or is freed, or another tensor is quantized.

        It must equal ``state.backend.quantize_activation`` of ``x`` as [M, K], bit for bit.
        """
        value.shared = Regrouped()
        if not x.is_inference():  # inference tensors have no version to compare
            self._source, self._key, self._value = weakref.ref(x, self._forget), self._key_of(x, state), value

    def _key_of(self, x: Tensor, state: Fp8State) -> tuple[Any, ...]:
        return x._version, *state.format

    def _forget(self, reference: weakref.ref[Tensor]) -> None:
        if self._source is reference:
            self._source = self._value = None


@dataclass
class Fp8State:
    """A layer's quantization settings and its last quantized weight. Not part of the state dict."""

    scale_format: ScaleFormat
    backend_name: str
    #: ranges of K whose FP32 sums a tensor-parallel rollout adds in order. Above 1 only in exact mode, for row-parallel layers
    splits: int = 1
    #: shared by the layers of a module that may read the same tensor
    inputs: LastInput = field(default_factory=LastInput, repr=False, compare=False)
    #: the trainer's own ranks that split the columns of a row-parallel layer; None if this process holds the whole layer
    ranks: RowRanks | None = None
    _cached: tuple[int, Quantized] | None = field(default=None, repr=False)
    #: the promise that the layer's own weight does not change (``unchanged``)
    promise: Promise | None = field(default=None, repr=False)
    #: called with a flag on the device: whether the kept weight differs from the weight (``unchanged``)
    audit: Callable[[Tensor], None] | None = field(default=None, repr=False)
    _kept: tuple[tuple[Any, ...], Quantized] | None = field(default=None, repr=False)

    @property
    def backend(self) -> Backend:
        """The run's backend, which the other side of the run uses too."""
        return get_backend(self.backend_name)

    @property
    def format(self) -> tuple[str, str]:
        """What the bytes of its operands depend on."""
        return self.backend_name, self.scale_format

    def promised(self, promise: Promise | None) -> None:
        """Start to rely on a promise, or stop with None. Drops the kept weight."""
        self.promise, self.audit, self._kept = promise, None, None

    def quantized(self, weight: Tensor, own: bool = False, last: bool = False, made_in: int | None = None) -> Quantized:
        """The bytes and scales of ``weight`` [N, K], cached while its content is unchanged.

        The layer's own weight is kept while a promise holds. It is also kept from a recomputation to the gradients that follow:
        nothing writes a weight in between, and a sharded model frees it only afterwards.

        Args:
            own: whether this is the layer's weight itself, not one that LoRA has changed.
            last: whether this is the last read of the weight in the backward pass.
            made_in: the backward pass that built the calling graph, if checkpointing runs one pass inside another.
        """
        if isinstance(weight, Fp8Gathered):
            return Quantized(weight.q, weight.s_blocks, "blocks", self.scale_format)
        if isinstance(weight, Fp8Shard):  # not sharded, or not yet
            return weight.quantized()
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

    def _of_content(self, weight: Tensor, transposed: bool = False) -> Quantized:
        w_NK = weight.detach().to(torch.bfloat16).contiguous()
        # The key is the content, because an optimizer, a checkpoint or an EMA can write without a trace.
        key = self.backend.fingerprint(w_NK)
        if key is not None and self._cached is not None and self._cached[0] == key:
            return self._cached[1]
        result = _quantize(self.backend, w_NK, self.scale_format, transposed)
        if key is not None:
            self._cached = (key, result)
        return result


def _quantize(backend: Backend, w_NK: Tensor, scale_format: ScaleFormat, transposed: bool = False) -> Quantized:
    """A BF16 weight as FProp and DGrad read it. Without square blocks DGrad always needs bytes of its own."""
    if not FORMATS[scale_format].square or (transposed and backend.reads_transposed):
        return backend.quantize_weight_transposed(w_NK, scale_format)
    return backend.quantize_weight(w_NK, scale_format)


def _differ(a: Quantized, b: Quantized) -> Tensor:
    """Whether any bit differs: a tensor on the device, so the host does not wait."""
    bytes_differ = (a.q.view(torch.uint8) != b.q.view(torch.uint8)).any()
    return bytes_differ | (a.s.view(torch.int32) != b.s.view(torch.int32)).any()


_BYTES: Attached[tuple[BothLayouts, int, tuple[str, str]]] = Attached(
    "jetrl_bytes", "autograd calls the backward of a layer with the gradient alone"
)


def set_quantized_gradient(grad: Tensor, both: BothLayouts, state: Fp8State) -> None:
    """Let bytes of a BF16 gradient [..., N] travel with it, to an ``Fp8Linear`` whose output it is the gradient of.

    A gradient that is changed, copied or added to another one on its way has none, and the layer quantizes it.

    Args:
        state: settings with which the bytes were made.
    """
    _BYTES.set(grad, (both, grad._version, state.format))


def quantized_gradient(grad: Tensor, state: Fp8State) -> BothLayouts | None:
    """The bytes that a gradient brings, if they are those of its values and a layer of ``state`` can read them."""
    both, *made = _BYTES.get(grad) or (None, None)
    return both if made == [grad._version, state.format] else None


def fprop(x: Tensor, w: Quantized, bias: Tensor | None, state: Fp8State) -> tuple[Tensor, Quantized]:
    """Y BF16 [..., N] of x [..., K] and a weight [N, K], and the quantized x."""
    x_MK = x.reshape(-1, x.shape[-1]).to(torch.bfloat16)
    quantized = state.inputs.quantize(x, x_MK, state)
    state.backend.compile_ahead(x_MK.shape[0], w, state.splits)
    if state.ranks is None:
        y_MN = state.backend.gemm(quantized, w, torch.bfloat16, state.splits)
    else:
        y_MN = state.ranks.product(state.backend, quantized, w, state.splits)
    if bias is not None:
        y_MN += bias.to(torch.bfloat16)  # in BF16, after the single rounding: the contract fixes this order
    rows = x.shape[:-1] if state.ranks is None else state.ranks.held(x.shape[:-1])
    return y_MN.view(*rows, y_MN.shape[1]), quantized


class _Fp8Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, state: Fp8State) -> Tensor:
        # Without DGrad, backward does not read the bytes of a recomputation.
        y, quantized = fprop(x, state.quantized(weight, own=True, last=not ctx.needs_input_grad[0]), bias, state)
        ctx.save_for_backward(*quantized, weight)
        # Not the ``Quantized`` itself, which would keep the input's bytes that checkpointing drops.
        ctx.shared = quantized.shared.add_reader(state) if quantized.shared and ctx.needs_input_grad[1] else None
        ctx.state, ctx.made_in = state, backward_pass()
        # Keep the parameter that has main_grad. Activation checkpointing may unpack another tensor of equal value.
        ctx.parameter = weight if has_main_grad(weight) else None
        ctx.x_dtype, ctx.w_dtype = x.dtype, weight.dtype
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        q_MK, s_MG, weight = ctx.saved_tensors
        state: Fp8State = ctx.state
        grad = grad_outputs[0] if state.ranks is None else state.ranks.whole(grad_outputs[0])
        both = quantized_gradient(grad, state)
        dy_MN = grad.reshape(-1, grad.shape[-1]).to(torch.bfloat16).contiguous()
        wants_x, wants_w, wants_b = ctx.needs_input_grad[:3]
        main = None if ctx.parameter is None else ctx.parameter.main_grad
        x = Quantized(q_MK, s_MG, "rows", state.scale_format, shared=ctx.shared)
        w = state.quantized(weight, own=True, last=True, made_in=ctx.made_in) if wants_x else None
        dx, dw = state.backend.gradients(dy_MN, x, w, (ctx.x_dtype, ctx.w_dtype if wants_w else None), main, both)
        if dx is not None:
            dx = dx.view(*grad.shape[:-1], dx.shape[1])
        if wants_w and ctx.parameter is not None:
            dw = added_to_main_grad(ctx.parameter)
        db = dy_MN.sum(0, dtype=torch.float32) if wants_b else None  # autograd casts it to the bias' dtype
        return dx, dw, db, None


def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None, state: Fp8State) -> Tensor:
    """``Fp8Linear.forward`` outside of a compiled graph, for modules of other frameworks. Collective with ``state.ranks``."""
    result: Tensor = _Fp8Matmul.apply(x, weight, bias, state)
    return result


_outside_of_graphs = fp8_linear


def keep_gathered_out_of_graphs() -> None:
    """Make layers with an FP8-gathered weight break the compiled graph. Called when such weights are created.

    Not done at import: ``torch.compiler.disable`` loads the whole compiler, which sets an environment variable.
    """
    global _outside_of_graphs
    if _outside_of_graphs is fp8_linear:
        _outside_of_graphs = torch.compiler.disable(fp8_linear)


def has_main_grad(weight: Any) -> bool:
    """Whether the framework accumulates this weight's gradient in FP32 (Megatron's ``main_grad``).

    False for Megatron-FSDP, whose own hooks create ``main_grad`` in every backward and fill it.
    """
    main = getattr(weight, "main_grad", None)
    return isinstance(main, Tensor) and main.dtype == torch.float32 and not hasattr(weight, "__fsdp_param__")


def added_to_main_grad(weight: Any) -> Tensor | None:
    """Mark that ``weight.main_grad`` holds the WGrad, as Megatron's fused accumulation does.

    Returns:
        The gradient for autograd. If the weight has ``grad_added_to_main_grad``, a dummy whose values nobody reads (zeros under
        ``zero_out_wgrad``); it makes the hooks run on the backward thread. Otherwise None.
    """
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    make = torch.zeros if getattr(weight, "zero_out_wgrad", False) else torch.empty
    return make(weight.main_grad.shape, dtype=weight.dtype, device=weight.main_grad.device)


class Fp8Linear(nn.Linear):
    """``nn.Linear`` whose GEMMs run in FP8.

    A layer's class is changed in place, so parameters, names, meta tensors, FSDP and ZeRO are unaffected.

    Input [..., K] of any float dtype (quantized from BF16), output [..., N] BF16.
    """

    fp8: Fp8State

    def forward(self, input: Tensor) -> Tensor:
        """[..., K] -> BF16 [..., N]. Gradients have the dtypes of input, weight and bias; a ``main_grad`` gets the weight's."""
        if torch.compiler.is_compiling():
            if isinstance(self.weight, (Fp8Gathered, Fp8Shard)):  # a graph cannot hold the gradient of bytes
                return _outside_of_graphs(input, self.weight, self.bias, self.fp8)
            state = self.fp8
            return _traced(input, self.weight, self.bias, state.backend_name, state.scale_format, state.splits)
        return fp8_linear(input, self.weight, self.bias, self.fp8)

    def extra_repr(self) -> str:
        splits = f", splits={self.fp8.splits}" if self.fp8.splits > 1 else ""
        return f"{super().extra_repr()}, fp8={self.fp8.scale_format}, backend={self.fp8.backend_name}{splits}"


# ---- The layer inside a compiled graph: opaque operators, because backends call libraries that cannot be traced
# Operators take tensors, so a ``Quantized`` is taken apart here. Quantizing the input is an operator of its own, which layers
# that read the same tensor share. A graph has no cache, so every call quantizes the weight. Weight gradients go back to autograd
# even if the framework has ``main_grad``; its hooks then add them.

def _traced(x: Tensor, weight: Tensor, bias: Tensor | None, backend: str, scale_format: str, splits: int) -> Tensor:
    """``Fp8Linear.forward`` as operators that a graph can hold."""
    x_MK = x.reshape(-1, x.shape[-1])
    q_MK, s_MG = _traced_quantize(x_MK.detach(), backend, scale_format)
    y_MN: Tensor = _traced_linear(x_MK, q_MK, s_MG, weight, bias, backend, scale_format, splits)
    return y_MN.view(*x.shape[:-1], weight.shape[0])


@torch.library.custom_op("jetrl_patch::fp8_quantize", mutates_args=())
def _traced_quantize(x_MK: Tensor, backend: str, scale_format: str) -> tuple[Tensor, Tensor]:
    kind = get_backend(backend)
    q_MK, s_MG = kind.quantize_activation(x_MK.to(torch.bfloat16), cast(ScaleFormat, scale_format))
    return q_MK, s_MG.t().contiguous().t() if kind.columns else s_MG


@_traced_quantize.register_fake
def _(x_MK: Tensor, backend: str, scale_format: str) -> tuple[Tensor, Tensor]:
    M, G = x_MK.shape[0], groups(x_MK.shape[1], FORMATS[scale_format].block)
    columns = get_backend(backend).columns
    s_MG = x_MK.new_empty(G, M, dtype=torch.float32).t() if columns else x_MK.new_empty(M, G, dtype=torch.float32)
    return x_MK.new_empty(x_MK.shape, dtype=torch.float8_e4m3fn), s_MG


@torch.library.custom_op("jetrl_patch::fp8_linear", mutates_args=())
def _traced_linear(
    x_MK: Tensor,  # not read: autograd attaches the input gradient to it
    q_MK: Tensor, s_MG: Tensor, weight: Tensor, bias: Tensor | None, backend: str, scale_format: str, splits: int,
) -> Tensor:  # fmt: skip
    kind = get_backend(backend)
    form = cast(ScaleFormat, scale_format)
    w = kind.quantize_weight(weight.to(torch.bfloat16).contiguous(), form)
    y_MN = kind.gemm(Quantized(q_MK, s_MG, "rows", form), w, torch.bfloat16, splits)
    if bias is not None:
        y_MN += bias.to(torch.bfloat16)  # not in the graph: fused with the next op, the sum would not be rounded
    return y_MN


@_traced_linear.register_fake
def _(x_MK: Tensor, q_MK: Tensor, s_MG: Tensor, weight: Tensor, *others: Any) -> Tensor:
    return x_MK.new_empty(x_MK.shape[0], weight.shape[0], dtype=torch.bfloat16)


@torch.library.custom_op("jetrl_patch::fp8_linear_backward", mutates_args=())
def _traced_backward(
    g_MN: Tensor, q_MK: Tensor, s_MG: Tensor, weight: Tensor, backend: str, scale_format: str, wanted: list[bool],
    x_dtype: torch.dtype, b_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    kind, form = get_backend(backend), cast(ScaleFormat, scale_format)
    g_MN = g_MN.to(torch.bfloat16).contiguous()
    x = Quantized(q_MK, s_MG, "rows", form)
    w = _quantize(kind, weight.to(torch.bfloat16).contiguous(), form) if wanted[0] else None
    dx, dw = kind.gradients(g_MN, x, w, (x_dtype, weight.dtype if wanted[1] else None))
    db = g_MN.sum(0, dtype=torch.float32).to(b_dtype) if wanted[2] else None
    dx, dw, db = (g_MN.new_empty(0) if t is None else t for t in (dx, dw, db))  # an operator cannot return None
    return dx, dw, db


@_traced_backward.register_fake
def _(
    g_MN: Tensor, q_MK: Tensor, s_MG: Tensor, weight: Tensor, backend: str, scale_format: str, wanted: list[bool],
    x_dtype: torch.dtype, b_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    shapes, dtypes = (q_MK.shape, weight.shape, weight.shape[:1]), (x_dtype, weight.dtype, b_dtype)
    dx, dw, db = (
        g_MN.new_empty(shape, dtype=dtype) if want else g_MN.new_empty(0, dtype=torch.bfloat16)
        for want, shape, dtype in zip(wanted, shapes, dtypes)
    )
    return dx, dw, db


def _setup_traced(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x_MK, q_MK, s_MG, weight, bias, ctx.backend, ctx.scale_format, _ = inputs
    ctx.save_for_backward(q_MK, s_MG, weight)
    ctx.dtypes = (x_MK.dtype, weight.dtype if bias is None else bias.dtype)


def _traced_gradients(ctx: Any, g_MN: Tensor) -> tuple[Tensor | None, ...]:
    q_MK, s_MG, weight = ctx.saved_tensors
    wanted = [ctx.needs_input_grad[i] for i in (0, 3, 4)]
    found = _traced_backward(g_MN, q_MK, s_MG, weight, ctx.backend, ctx.scale_format, wanted, *ctx.dtypes)
    dx, dw, db = (t if want else None for t, want in zip(found, wanted))
    return dx, None, None, dw, db, None, None, None


_traced_linear.register_autograd(_traced_gradients, setup_context=_setup_traced)
