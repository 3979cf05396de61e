"""RMSNorm and SiLU * up fused with quantization: the FP8 layers that follow reuse the bytes.

| operation                 | one kernel reads          | and writes                                          | hands over     |
| RMSNorm                   | x BF16 [M, K], w [K]      | y BF16 [M, K], q e4m3, s [M, G], 1 / rms [M]        | (q, s)         |
| its gradient              | x, dy, the residual's     | dx BF16 [M, K], the residual's gradient added       |                |
| SiLU(gate) * up           | gate, up BF16 [M, K]      | y BF16 [M, K], q e4m3, s [M, G]                     | (q, s)         |
| its gradient, where gate  | gate, up, dy BF16 [M, K]  | dgate, dup BF16 [M, K], each also in both layouts   | both layouts   |
| and up come of FP8 layers |                           | of ``quantize_both``                                | of each        |

y equals that of ``exact.norm`` or ``exact.activation``, and (q, s) equals ``quantize_activation(y)``, bit for bit. Fusion
saves a pass over y and kernel launches. Backward is one kernel too, that of the exact ops. Hugging Face's own norm sums in
FP32, so its last bit may differ; these replace it only under ``align="linear"``, which promises equal linears and nothing more.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jetrl_patch.exact.activation import silu_mul_gradients
from jetrl_patch.exact.norm import rms_norm_gradients
from jetrl_patch.fp8.backends import get_backend
from jetrl_patch.fp8.handed import HANDED
from jetrl_patch.fp8.linear import Fp8State, hand_over

__all__ = ["available", "rms_norm", "silu_mul"]


def available(backend: str, device_type: str) -> bool:
    """Whether norms and activations can be fused: on a GPU, with a backend that has the kernels. Decided only here."""
    return device_type == "cuda" and hasattr(get_backend(backend), "producers")


def _kernels(state: Fp8State, *inputs: Tensor) -> Any | None:
    """The fused kernels if they accept these inputs (BF16 only), else None. Under torch.compile Inductor fuses the norm."""
    if torch.compiler.is_compiling():
        return None
    from jetrl_patch.fp8.backends.gpu import GpuBackend

    backend = state.backend
    kernels = backend.producers(inputs[0]) if isinstance(backend, GpuBackend) else None
    return kernels if all(t.dtype == torch.bfloat16 for t in inputs) else None


def _rows(x: Tensor) -> Tensor:
    x_MK = x.reshape(-1, x.shape[-1])
    return x_MK if x_MK.stride(-1) == 1 else x_MK.contiguous()


class _NormedRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, state: Fp8State, kernels: Any) -> tuple[Tensor, ...]:
        x_MK = _rows(x)
        columns: bool = state.backend.columns  # type: ignore[attr-defined]
        made = kernels.rmsnorm_quantize_rows(x_MK, weight.detach().contiguous(), eps, state.scale_format, True, columns)
        ctx.save_for_backward(x_MK, weight, made.rstd_M)
        ctx.x_dtype, ctx.w_dtype = x.dtype, weight.dtype
        ctx.set_materialize_grads(False)  # nobody reads gradients of bytes and scales: do not write zeros for them
        ctx.mark_non_differentiable(made.q_MK, made.s_MG)
        return made.y_MK.view(x.shape), x, made.q_MK, made.s_MG

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        return *rms_norm_gradients(ctx, True, *grad_outputs[:2]), None, None, None


class _MultipliedRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, state: Fp8State, kernels: Any, quantize: bool) -> tuple[Tensor, ...]:
        columns: bool = state.backend.columns  # type: ignore[attr-defined]
        made = kernels.silu_mul_quantize_rows(_rows(gate), _rows(up), state.scale_format, columns, keep=True)
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
        from jetrl_patch.kernels.silu_backward import silu_mul_backward_both

        state, form, gradients = ctx.state, ctx.state.scale_format, []
        rows = _rows(gate), _rows(up), _rows(grad_outputs[0])
        for grad_MK, both in silu_mul_backward_both(*rows, form, state.backend.columns):
            gradients.append(grad := grad_MK.view(gate.shape))
            HANDED.keep(grad, both, state.backend_name, form)
        return *gradients, None, None, None


def rms_norm(x: Tensor, weight: Tensor, eps: float, state: Fp8State) -> tuple[Tensor, Tensor] | None:
    """RMSNorm of x [..., K] in BF16, handing over the quantized rows; None if the kernel does not accept these inputs.

    Args:
        state: quantization settings of the layers that read the result.

    Returns:
        The result, and x as ``exact.norm.rms_norm_passing`` passes it on.
    """
    kernels = _kernels(state, x, weight)
    if kernels is None or x.shape[-1] > kernels.WIDEST:
        return None
    y, passed, q, s = _NormedRows.apply(x, weight, eps, state, kernels)
    hand_over(y, (q, s), state)
    return y, passed if x.requires_grad else x


def silu_mul(gate: Tensor, up: Tensor, state: Fp8State, quantize_gradients: bool = False) -> Tensor | None:
    """SiLU(gate) * up, BF16 [..., K], handing over the quantized rows; None if the kernel does not accept these inputs.

    Args:
        quantize_gradients: hand over the quantized gradients too: gate and up come straight from FP8 layers of the same settings,
            which compute both of their gradients.
    """
    kernels = _kernels(state, gate, up)
    if kernels is None:
        return None
    y, q, s = _MultipliedRows.apply(gate, up, state, kernels, quantize_gradients)
    hand_over(y, (q, s), state)
    return y
