"""BF16 linear layers with independent rows: ``lm_head``, and layers kept out of FP8."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jetrl_patch.exact.dispatch import implementation
from jetrl_patch.native import ops


def _product(x_MK: Tensor, w_NK: Tensor, out_dtype: torch.dtype) -> Tensor:
    serves = implementation(x_MK)
    if serves == "native":
        return ops.bf16_gemm(x_MK, w_NK, out_dtype)
    if serves == "triton":
        from jetrl_patch.kernels import head

        return head.bf16_gemm(x_MK, w_NK, out_dtype)
    return (x_MK.double() @ w_NK.double().t()).to(out_dtype)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, splits: int) -> Tensor:
        x_MK = x.reshape(-1, x.shape[-1]).to(torch.bfloat16)
        w_NK = weight.detach().to(torch.bfloat16)
        if splits == 1:
            y = _product(x_MK, w_NK, torch.bfloat16)
        else:  # FP32 partial sums of a row-parallel rollout, added in rank order, rounded once
            total: Tensor | None = None
            for xs, ws in zip(x_MK.chunk(splits, 1), w_NK.chunk(splits, 1), strict=True):
                part = _product(xs, ws, torch.float32)
                total = part if total is None else total + part
            assert total is not None
            y = total.to(torch.bfloat16)
        ctx.save_for_backward(x_MK, w_NK)
        ctx.x_dtype, ctx.w_dtype = x.dtype, weight.dtype
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_MK, w_NK = ctx.saved_tensors
        grad = grad_outputs[0]
        g_MN = grad.reshape(-1, grad.shape[-1]).to(torch.bfloat16)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = ops.product(g_MN, w_NK).to(ctx.x_dtype).view(*grad.shape[:-1], -1)
        if ctx.needs_input_grad[1]:
            dw = ops.product(g_MN.t(), x_MK).to(ctx.w_dtype)
        return dx, dw, None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, splits: int = 1) -> Tensor:
    """Y = bf16(X W^T), then + bias in BF16.

    Args:
        x: [..., K]. weight: [N, K]. bias: [N]. splits: number of ranges of K whose FP32 sums a tensor-parallel rollout adds.

    Returns:
        BF16 [..., N]. Gradients use ordinary BF16 products.
    """
    result: Tensor = _Linear.apply(x, weight, splits)
    return result if bias is None else result + bias.to(torch.bfloat16)


def partial_sum(x_MK: Tensor, w_NK: Tensor) -> Tensor:
    """The unrounded FP32 product [M, N] of a row-parallel rank (no gradient)."""
    return _product(x_MK, w_NK, torch.float32)


class _Fp32Head(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x_MK = x.reshape(-1, x.shape[-1]).to(torch.bfloat16)
        w_VK = weight.detach().to(torch.bfloat16)
        ctx.save_for_backward(x_MK, w_VK)
        ctx.x_dtype, ctx.w_dtype = x.dtype, weight.dtype
        return _product(x_MK, w_VK, torch.float32).view(*x.shape[:-1], w_VK.shape[0])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_MK, w_VK = ctx.saved_tensors
        grad = grad_outputs[0]
        g_MV = grad.reshape(-1, grad.shape[-1]).float()
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = torch.mm(g_MV, w_VK.float()).to(ctx.x_dtype).view(*grad.shape[:-1], w_VK.shape[1])
        if ctx.needs_input_grad[1]:
            dw = torch.mm(g_MV.t(), x_MK.float()).to(ctx.w_dtype)
        return dx, dw


def head_linear_fp32(x: Tensor, w_VK: Tensor) -> Tensor:
    """FP32 logits [..., V], the unrounded sum, of BF16 hidden states [..., K] and weight [V, K]. Gradients in FP32."""
    result: Tensor = _Fp32Head.apply(x, w_VK)
    return result


def head_linear(x_MK: Tensor, w_VK: Tensor) -> Tensor:
    """BF16 logits [..., V] of hidden states [..., K] and the live ``lm_head`` weight [V, K]."""
    return linear(x_MK, w_VK)
