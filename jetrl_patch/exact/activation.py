"""SiLU and product as Hugging Face rounds them: bf16(bf16(silu(gate)) * up)."""

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
        else:  # element by element: no reduction, nothing that could depend on a neighbour
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
    """BF16 [..., K] from gate and up [..., K] (computed from their BF16 values)."""
    result: Tensor = _SiluMul.apply(gate, up)
    return result
