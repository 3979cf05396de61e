"""RMSNorm and SiLU(gate) * up with the rounding of Hugging Face models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jetrl_patch.backends.gpu import written
from jetrl_patch.exact.dispatch import implementation
from jetrl_patch.native import ops

# ---- How a norm passes its input on to the residual of its block: beside its result, which stays a tensor for hooks and wrappers

_NAME = "jetrl_passed"


def passing(y: Tensor, x: Tensor) -> Tensor:
    """The result of a norm, which carries the input that the norm passes on."""
    setattr(y, _NAME, x)
    return y


def passed(norm: Any, x: Tensor) -> tuple[Any, Tensor]:
    """The result of a norm, and x as the norm passes it on. It is x itself if the norm passes nothing, or a wrapper lost it."""
    y = norm(x)
    if torch.compiler.is_compiling():
        return y, x
    return y, getattr(y, "__dict__", {}).pop(_NAME, x)


# ---- RMSNorm in the rounding order of Hugging Face models: y = bf16(w * bf16(x / rms(x))) --------

class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, passes: bool) -> Any:
        x_MK = x.reshape(-1, x.shape[-1]).to(torch.bfloat16)
        w_K = weight.detach().to(torch.bfloat16)
        serves = implementation(x)
        if serves == "native":
            y, rstd = ops.rms_norm(x_MK, w_K, eps)
        elif serves == "triton":
            from jetrl_patch.kernels import norm

            y, rstd = norm.rms_norm(x_MK, w_K, eps)
        else:  # FP64 sums: their order changes the FP32 result in about one row in 10^8
            exact = x_MK.double()
            rstd = (exact.pow(2).mean(-1) + eps).rsqrt().float()
            y = w_K * (x_MK.float() * rstd.unsqueeze(-1)).to(torch.bfloat16)
        ctx.save_for_backward(x_MK, w_K, rstd)
        ctx.x_dtype, ctx.w_dtype = x.dtype, weight.dtype
        ctx.set_materialize_grads(False)
        return (y.view(x.shape), x) if passes else y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        kernel = implementation(next(g for g in grad_outputs if g is not None)) == "triton"
        return *rms_norm_gradients(ctx, kernel, *grad_outputs), None, None


def rms_norm_gradients(
    ctx: Any, kernel: bool, dy: Tensor | None, other: Tensor | None = None
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of x and of the weight, computed in FP32.

    Args:
        ctx: of a forward pass on x and the weight, which saved their BF16 values [M, K] and [K] and 1/rms FP32 [M].
        kernel: use the Triton kernel, not torch's operations.
        dy: the gradient of the result.
        other: the gradient of x as it was passed on, in BF16; it is added to that of x, as autograd would.
    """
    if dy is None:
        return other, None
    x_MK, w_K, rstd = ctx.saved_tensors
    wants_x, wants_w = ctx.needs_input_grad[:2]
    dy_MK = dy.reshape(x_MK.shape)
    dx = dw = None
    if kernel:
        from jetrl_patch.kernels.norm import rms_norm_backward

        more = None if other is None else other.reshape(x_MK.shape)
        dx, dw = rms_norm_backward(x_MK, w_K, rstd, dy_MK, written(ctx.x_dtype), wants_w, more)
    else:
        g, hat = dy_MK.float(), x_MK.float() * rstd.unsqueeze(-1)
        if wants_x:
            gw = g * w_K.float()
            dx = (gw - hat * (gw * hat).mean(-1, keepdim=True)) * rstd.unsqueeze(-1)
        if wants_w:
            dw = (g * hat).sum(0)
    dx = dx.to(ctx.x_dtype).view(dy.shape) if dx is not None and wants_x else None
    if not kernel and dx is not None and other is not None:
        dx = dx + other
    return dx, None if dw is None else dw.to(ctx.w_dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension.

    Args:
        x: [..., K], computed from its BF16 value. weight: [K]. eps: added to the mean square.

    Returns:
        BF16 [..., K].
    """
    result: Tensor = _RMSNorm.apply(x, weight, eps, False)
    return result


def rms_norm_passing(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """RMSNorm, and x again for the residual: what comes back along it is added to the gradient of x in the norm's own kernel.

    Returns:
        The result of ``rms_norm``, and x: a view of it in a graph that its gradient passes, if x is BF16.
    """
    if x.dtype != torch.bfloat16 or not (x.requires_grad and torch.is_grad_enabled()):
        return rms_norm(x, weight, eps), x
    y, passed = _RMSNorm.apply(x, weight, eps, True)
    return y, passed


# ---- SiLU(gate) * up with the rounding of Hugging Face models: bf16(bf16(silu(gate)) * up) -------

class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        g, u = gate.to(torch.bfloat16), up.to(torch.bfloat16)
        serves, width = implementation(g), g.shape[-1]
        if serves == "native":
            y = ops.silu_mul(g.reshape(-1, width), u.reshape(-1, width)).view(g.shape)
        elif serves == "triton":
            from jetrl_patch.kernels import elementwise

            y = elementwise.silu_mul(g.reshape(-1, width), u.reshape(-1, width)).view(g.shape)
        else:  # elementwise: without a reduction, no element can depend on a neighbour
            exact = g.double()
            y = (exact * torch.sigmoid(exact)).to(torch.bfloat16) * u
        ctx.save_for_backward(g, u)
        ctx.dtypes = gate.dtype, up.dtype
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return silu_mul_gradients(gate, up, grad_outputs[0], ctx.dtypes, implementation(gate) == "triton")


def silu_mul_gradients(
    gate: Tensor, up: Tensor, dy: Tensor, dtypes: tuple[torch.dtype, torch.dtype], kernel: bool
) -> tuple[Tensor, Tensor]:
    """The gradients of BF16 gate and up [..., K] in ``dtypes``, computed in FP32.

    Args:
        kernel: use the Triton kernel, not torch's operations.
    """
    if kernel:
        from jetrl_patch.kernels.silu import silu_mul_backward

        gate_MK, up_MK, dy_MK = (t.reshape(-1, t.shape[-1]) for t in (gate, up, dy))
        dgate, dup = silu_mul_backward(gate_MK, up_MK, dy_MK, (written(dtypes[0]), written(dtypes[1])))
        return dgate.view(gate.shape).to(dtypes[0]), dup.view(up.shape).to(dtypes[1])
    g, u, dy = gate.float(), up.float(), dy.float()
    sigmoid = torch.sigmoid(g)
    dg = dy * u * sigmoid * (1 + g * (1 - sigmoid))
    return dg.to(dtypes[0]), (dy * g * sigmoid).to(dtypes[1])


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """SiLU(gate) * up, BF16 [..., K], computed from the BF16 values of gate and up [..., K]."""
    result: Tensor = _SiluMul.apply(gate, up)
    return result
