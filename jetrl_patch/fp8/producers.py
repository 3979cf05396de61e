"""Norms and activations that also quantize the input of the next FP8 linear, in the rollout and in the trainer."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from jetrl_patch.backends import get_backend
from jetrl_patch.backends.gpu import GpuBackend, both_layouts
from jetrl_patch.backends.quantize import Quantized
from jetrl_patch.config.formats import ScaleFormat
from jetrl_patch.exact.elementwise import rms_norm_gradients, silu_mul_gradients
from jetrl_patch.fp8.linear import Fp8State, set_quantized_gradient
from jetrl_patch.kernels.formats import FP8, groups

# ---- The rollout: a producer passes bytes and scales to the next FP8 linear instead of a BF16 tensor
# | operation                     | one launch reads                     | and writes                                  |
# | the residual's sum, RMSNorm   | x, residual BF16 [M, K], w [K]       | the sum BF16 [M, K], q e4m3 [M, K], s [M, G] |
# | SiLU(gate) * up               | gate and up side by side, BF16 [M, 2K] | q e4m3 [M, K], s [M, G]                    |
#
# The linear would make the same bytes from the BF16 result, which nothing else reads, and that result is never written. Nothing
# is saved for a backward pass. In a compiled graph each operation is one opaque operator: the compiler can neither change a
# rounding nor trace a library call.

#: widths that are multiples of this give results that do not depend on how the compiler spreads a row over threads
ALIGN = 16


def fits(backend: GpuBackend, like: Tensor, width: int) -> bool:
    """Whether both kernels run for rows of this width on the device of ``like``."""
    kernels = backend.producers(like)
    return kernels is not None and width <= kernels.WIDEST and not width % ALIGN


def normed(
    x_MK: Tensor, residual_MK: Tensor | None, weight_K: Tensor, eps: float, backend: GpuBackend, scale_format: ScaleFormat
) -> tuple[Quantized, Tensor | None]:
    """The quantized RMSNorm of x + residual (both BF16), and the sum. Without a residual, that of x, and None."""
    if torch.compiler.is_compiling():
        q_MK, s_MG, total_MK = _normed(x_MK, residual_MK, weight_K, eps, backend.name, scale_format)
        return Quantized(q_MK, s_MG, "rows", scale_format), None if residual_MK is None else total_MK
    return backend.norm_rows(x_MK, residual_MK, weight_K, eps, scale_format)


def multiplied(both_MF: Tensor, backend: GpuBackend, scale_format: ScaleFormat) -> Quantized:
    """The quantized SiLU(gate) * up of BF16 [M, 2K]: gate, then up."""
    if torch.compiler.is_compiling():
        q_MK, s_MG = _multiplied(both_MF, backend.name, scale_format)
        return Quantized(q_MK, s_MG, "rows", scale_format)
    gate_MK, up_MK = both_MF.chunk(2, 1)
    return backend.silu_mul_rows(gate_MK, up_MK, scale_format)


def _gpu(name: str) -> GpuBackend:
    return cast(GpuBackend, get_backend(name))


def _new_rows(x: Tensor, K: int, backend: str) -> tuple[Tensor, Tensor]:
    """Outputs of a graph, laid out as ``kernels.common.new_rows`` does."""
    M, G = x.shape[0], groups(K)
    q_MK = x.new_empty(M, K, dtype=FP8)
    if get_backend(backend).columns:
        return q_MK, x.new_empty(G, -(-M // 4) * 4, dtype=torch.float32)[:, :M].t()
    return q_MK, x.new_empty(M, G, dtype=torch.float32)


@torch.library.custom_op("jetrl_patch::norm_rows", mutates_args=())
def _normed(
    x_MK: Tensor, residual_MK: Tensor | None, weight_K: Tensor, eps: float, backend: str, scale_format: str
) -> tuple[Tensor, Tensor, Tensor]:
    rows, total = _gpu(backend).norm_rows(x_MK, residual_MK, weight_K, eps, cast(ScaleFormat, scale_format))
    return rows.q, rows.s, x_MK.new_empty(0) if total is None else total  # an operator cannot return None


@_normed.register_fake
def _(x_MK: Tensor, residual_MK: Tensor | None, weight_K: Tensor, eps: float, backend: str, *others: Any) -> tuple[Tensor, ...]:
    total = x_MK.new_empty(0) if residual_MK is None else x_MK.new_empty(x_MK.shape)
    return *_new_rows(x_MK, x_MK.shape[1], backend), total


@torch.library.custom_op("jetrl_patch::silu_mul_rows", mutates_args=())
def _multiplied(both_MF: Tensor, backend: str, scale_format: str) -> tuple[Tensor, Tensor]:
    return tuple(multiplied(both_MF, _gpu(backend), cast(ScaleFormat, scale_format)))


@_multiplied.register_fake
def _(both_MF: Tensor, backend: str, scale_format: str) -> tuple[Tensor, Tensor]:
    return _new_rows(both_MF, both_MF.shape[1] // 2, backend)


# ---- The trainer: RMSNorm and SiLU * up also write the bytes that the next FP8 layers read -------
# | operation                 | one kernel reads          | and writes                                          | bytes          |
# | RMSNorm                   | x BF16 [M, K], w [K]      | y BF16 [M, K], q e4m3, s [M, G], 1 / rms [M]        | (q, s)         |
# | its gradient              | x, dy                     | dx BF16 [M, K]                                      |                |
# | SiLU(gate) * up           | gate, up BF16 [M, K]      | y BF16 [M, K], q e4m3, s [M, G]                     | (q, s)         |
# | its gradient, if gate and | gate, up, dy BF16 [M, K]  | dgate, dup BF16 [M, K], each also in both layouts   | both layouts   |
# | up come from FP8 layers   |                           | of ``quantize_both``                                | of each        |
#
# y equals the result of ``exact.elementwise``, and (q, s) equals ``quantize_activation(y)``, bit for bit. Fusion saves a pass
# over y, and kernel launches. Backward is one kernel too, that of the exact ops. Hugging Face's own norm sums in FP32, so with
# ``align="linear"``, which promises equal linears and nothing more, its last bit may differ.

def available(backend: str, device_type: str) -> bool:
    """Whether norms and activations can be fused: on a GPU, with a backend that has the kernels. Decided only here."""
    return device_type == "cuda" and hasattr(get_backend(backend), "producers")


def _kernels(state: Fp8State, *inputs: Tensor) -> Any | None:
    """The fused kernels if they accept these inputs (BF16 only), else None. Under torch.compile, Inductor fuses the norm."""
    backend = state.backend
    if torch.compiler.is_compiling() or not isinstance(backend, GpuBackend):
        return None
    kernels = backend.producers(inputs[0])
    return kernels if all(t.dtype == torch.bfloat16 for t in inputs) else None


def _rows(x: Tensor) -> Tensor:
    x_MK = x.reshape(-1, x.shape[-1])
    return x_MK if x_MK.stride(-1) == 1 else x_MK.contiguous()


class _NormedRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, state: Fp8State, kernels: Any) -> tuple[Tensor, ...]:
        x_MK = _rows(x)
        given = (x_MK, None, weight.detach().contiguous(), eps, state.scale_format)
        made = kernels.norm_quantize_rows(*given, state.backend.columns, keep=True)
        ctx.save_for_backward(x_MK, weight, made.rstd_M)
        ctx.x_dtype, ctx.w_dtype = x.dtype, weight.dtype
        ctx.set_materialize_grads(False)  # no zeros for the gradients of bytes and scales
        ctx.mark_non_differentiable(made.q_MK, made.s_MG)
        return made.y_MK.view(x.shape), made.q_MK, made.s_MG

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return *rms_norm_gradients(ctx, True, grad_outputs[0]), None, None, None


class _MultipliedRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, state: Fp8State, kernels: Any, quantize: bool) -> tuple[Tensor, ...]:
        given = (_rows(gate), _rows(up), state.scale_format)
        made = kernels.silu_mul_quantize_rows(*given, keep=True, columns=state.backend.columns)
        ctx.save_for_backward(gate, up)
        ctx.dtypes, ctx.state, ctx.quantize = (gate.dtype, up.dtype), state, quantize
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(made.q_MK, made.s_MG)
        return made.y_MK.view(gate.shape), made.q_MK, made.s_MG

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        if not ctx.quantize:
            return *silu_mul_gradients(gate, up, grad_outputs[0], ctx.dtypes, True), None, None, None
        from jetrl_patch.kernels.silu import silu_mul_backward_both

        state, form, gradients = ctx.state, ctx.state.scale_format, []
        rows = _rows(gate), _rows(up), _rows(grad_outputs[0])
        for grad_MK, both in silu_mul_backward_both(*rows, form, state.backend.columns):
            gradients.append(grad := grad_MK.view(gate.shape))
            set_quantized_gradient(grad, both_layouts(both, form), state)
        return *gradients, None, None, None


def rms_norm(x: Tensor, weight: Tensor, eps: float, state: Fp8State) -> Tensor | None:
    """RMSNorm of x [..., K] in BF16, which also quantizes rows for the next layers. None if the kernel cannot take the inputs.

    Args:
        state: quantization settings of the layers that read the result.
    """
    kernels = _kernels(state, x, weight)
    if kernels is None or x.shape[-1] > kernels.WIDEST:
        return None
    y, q, s = _NormedRows.apply(x, weight, eps, state, kernels)
    state.inputs.keep(y, Quantized(q, s, "rows", state.scale_format), state)
    return cast(Tensor, y)


def silu_mul(gate: Tensor, up: Tensor, state: Fp8State, quantize_gradients: bool = False) -> Tensor | None:
    """SiLU(gate) * up, BF16 [..., K], which also quantizes rows for the next layer. None if the kernel cannot take the inputs.

    Args:
        quantize_gradients: also quantize the gradients. Only if gate and up come straight from FP8 layers with the same settings
            that compute both of their gradients.
    """
    kernels = _kernels(state, gate, up)
    if kernels is None:
        return None
    y, q, s = _MultipliedRows.apply(gate, up, state, kernels, quantize_gradients)
    state.inputs.keep(y, Quantized(q, s, "rows", state.scale_format), state)
    return y
