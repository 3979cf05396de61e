"""RMSNorm in the rounding order of Hugging Face models: y = bf16(w * bf16(x / rms(x)))."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jetrl_patch.exact.dispatch import implementation
from jetrl_patch.native import ops


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
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
        return y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_MK, w_K, rstd = ctx.saved_tensors
        g = grad_outputs[0].reshape(x_MK.shape).float()
        hat = x_MK.float() * rstd.unsqueeze(-1)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            gw = g * w_K.float()
            dx = (gw - hat * (gw * hat).mean(-1, keepdim=True)) * rstd.unsqueeze(-1)
            dx = dx.to(ctx.x_dtype).view(grad_outputs[0].shape)
        if ctx.needs_input_grad[1]:
            dw = (g * hat).sum(0).to(ctx.w_dtype)
        return dx, dw, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension.

    Args:
        x: [..., K], computed from its BF16 value. weight: [K]. eps: added to the mean square.

    Returns:
        BF16 [..., K].
    """
    result: Tensor = _RMSNorm.apply(x, weight, eps)
    return result
