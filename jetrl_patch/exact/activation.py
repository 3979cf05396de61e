"""SiLU(gate) * up with the rounding of Hugging Face models: bf16(bf16(silu(gate)) * up)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jetrl_patch.exact.dispatch import implementation
from jetrl_patch.fp8.backends.gpu import written
from jetrl_patch.native import ops


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
        from jetrl_patch.kernels.silu_backward import silu_mul_backward

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
