"""SiLU(gate) * up with the rounding of Hugging Face models: bf16(bf16(silu(gate)) * up)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jetrl_patch.exact.dispatch import implementation
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
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None]:
        g, u = (t.float() for t in ctx.saved_tensors)
        dy = grad_outputs[0].float()
        sigmoid = torch.sigmoid(g)
        dg = dy * u * sigmoid * (1 + g * (1 - sigmoid))
        return dg.to(ctx.dtypes[0]), (dy * g * sigmoid).to(ctx.dtypes[1])


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """SiLU(gate) * up, BF16 [..., K], computed from the BF16 values of gate and up [..., K]."""
    result: Tensor = _SiluMul.apply(gate, up)
    return result
