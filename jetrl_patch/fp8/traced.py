"""``Fp8Linear`` inside a compiled graph, as opaque operators: backends call libraries that cannot be traced.

Shape legend as in ``backends.base``. Quantizing the input is a separate operator, so layers that read the same tensor
share it. A graph has no cache, so the weight is quantized in every call. Weight gradients are returned to autograd even
where the framework has ``main_grad``; its hooks then add them.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from jetrl_patch.backends import get_backend
from jetrl_patch.backends.quantize import QuantizedWeight
from jetrl_patch.kernels.formats import ScaleFormat, groups


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, backend: str, scale_format: str, splits: int) -> Tensor:
    """``Fp8Linear.forward`` as operators that a graph can hold."""
    x_MK = x.reshape(-1, x.shape[-1])
    q_MK, s_MG = _quantize(x_MK.detach(), backend, scale_format)
    y_MN: Tensor = _linear(x_MK, q_MK, s_MG, weight, bias, backend, scale_format, splits)
    return y_MN.view(*x.shape[:-1], weight.shape[0])


@torch.library.custom_op("jetrl_patch::fp8_quantize", mutates_args=())
def _quantize(x_MK: Tensor, backend: str, scale_format: str) -> tuple[Tensor, Tensor]:
    kind = get_backend(backend)
    q_MK, s_MG = kind.quantize_activation(x_MK.to(torch.bfloat16), cast(ScaleFormat, scale_format))
    return q_MK, s_MG.t().contiguous().t() if getattr(kind, "columns", False) else s_MG


@_quantize.register_fake
def _(x_MK: Tensor, backend: str, scale_format: str) -> tuple[Tensor, Tensor]:
    M, G = x_MK.shape[0], groups(x_MK.shape[1])
    columns = getattr(get_backend(backend), "columns", False)
    s_MG = x_MK.new_empty(G, M, dtype=torch.float32).t() if columns else x_MK.new_empty(M, G, dtype=torch.float32)
    return x_MK.new_empty(x_MK.shape, dtype=torch.float8_e4m3fn), s_MG


@torch.library.custom_op("jetrl_patch::fp8_linear", mutates_args=())
def _linear(
    x_MK: Tensor,  # not read: autograd attaches the input gradient to it
    q_MK: Tensor,
    s_MG: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    backend: str,
    scale_format: str,
    splits: int,
) -> Tensor:
    kind = get_backend(backend)
    q_NK, s_blocks = kind.quantize_weight(weight.to(torch.bfloat16).contiguous(), cast(ScaleFormat, scale_format))
    y_MN = kind.product(q_MK, s_MG, QuantizedWeight(q_NK, s_blocks), torch.bfloat16, splits)
    if bias is not None:
        y_MN += bias.to(torch.bfloat16)  # not in the graph: fused with the next op, the sum would not be rounded
    return y_MN


@_linear.register_fake
def _(
    x_MK: Tensor,
    q_MK: Tensor,
    s_MG: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    backend: str,
    scale_format: str,
    splits: int,
) -> Tensor:
    return x_MK.new_empty(x_MK.shape[0], weight.shape[0], dtype=torch.bfloat16)


@torch.library.custom_op("jetrl_patch::fp8_linear_backward", mutates_args=())
def _backward(
    g_MN: Tensor,
    q_MK: Tensor,
    s_MG: Tensor,
    weight: Tensor,
    backend: str,
    scale_format: str,
    wanted: list[bool],
    x_dtype: torch.dtype,
    b_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    kind, form = get_backend(backend), cast(ScaleFormat, scale_format)
    g_MN = g_MN.to(torch.bfloat16).contiguous()
    dx = dw = db = None
    if wanted[0]:
        q_NK, s_blocks = kind.quantize_weight(weight.to(torch.bfloat16).contiguous(), form)
    if wanted[0] and wanted[1]:
        dx, dw = kind.gradients(g_MN, q_NK, s_blocks, q_MK, s_MG, form, (x_dtype, weight.dtype))
    elif wanted[0]:
        dx = kind.dgrad(g_MN, q_NK, s_blocks, form, x_dtype)
    elif wanted[1]:
        dw = kind.wgrad(g_MN, q_MK, s_MG, form, weight.dtype)
    if wanted[2]:
        db = g_MN.sum(0, dtype=torch.float32).to(b_dtype)
    dx, dw, db = (g_MN.new_empty(0) if t is None else t for t in (dx, dw, db))  # an operator cannot return None
    return dx, dw, db


@_backward.register_fake
def _(
    g_MN: Tensor,
    q_MK: Tensor,
    s_MG: Tensor,
    weight: Tensor,
    backend: str,
    scale_format: str,
    wanted: list[bool],
    x_dtype: torch.dtype,
    b_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    shapes, dtypes = (q_MK.shape, weight.shape, weight.shape[:1]), (x_dtype, weight.dtype, b_dtype)
    dx, dw, db = (
        g_MN.new_empty(shape, dtype=dtype) if want else g_MN.new_empty(0, dtype=torch.bfloat16)
        for want, shape, dtype in zip(wanted, shapes, dtypes)
    )
    return dx, dw, db


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x_MK, q_MK, s_MG, weight, bias, ctx.backend, ctx.scale_format, _ = inputs
    ctx.save_for_backward(q_MK, s_MG, weight)
    ctx.dtypes = (x_MK.dtype, weight.dtype if bias is None else bias.dtype)


def _gradients(ctx: Any, g_MN: Tensor) -> tuple[Tensor | None, ...]:
    q_MK, s_MG, weight = ctx.saved_tensors
    wanted = [ctx.needs_input_grad[i] for i in (0, 3, 4)]
    found = _backward(g_MN, q_MK, s_MG, weight, ctx.backend, ctx.scale_format, wanted, *ctx.dtypes)
    dx, dw, db = (t if want else None for t, want in zip(found, wanted))
    return dx, None, None, dw, db, None, None, None


_linear.register_autograd(_gradients, setup_context=_setup)
