"""The CPU backend: C kernels for the quantizers and FProp, torch products of exact BF16 operands for the gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from jetrl_patch.backends.base import Backend
from jetrl_patch.backends.quantize import Quantized, ScaleLayout
from jetrl_patch.kernels.formats import BLOCK, ScaleFormat, block_of
from jetrl_patch.native import ops
from jetrl_patch.native.build import multiplies_bf16


class NativeBackend(Backend):
    """Rows are independent by construction (see ``kernels.c``)."""

    name = "native"

    def quantize_activation(self, x_MK: Tensor, scale_format: ScaleFormat) -> Quantized:
        return _quantized(x_MK, "rows", scale_format)

    def quantize_tokens(self, x_MK: Tensor, scale_format: ScaleFormat) -> Quantized:
        return _quantized(x_MK, "tokens", scale_format)

    def quantize_weight(self, w_NK: Tensor, scale_format: ScaleFormat) -> Quantized:
        return _quantized(w_NK.to(torch.bfloat16), "rows" if scale_format == "mxfp8" else "blocks", scale_format)

    def gemm(self, x: Quantized, w: Quantized, out_dtype: torch.dtype, splits: int = 1) -> Tensor:
        packed = w.packed if splits == 1 else None
        return ops.fp8_gemm(x.q, x.s_rows, w.q, w.s_rows, out_dtype, splits, packed, w.block)

    def pack(self, w: Quantized) -> Tensor | None:
        return ops.pack(w.q)

    def dgrad(self, dy_MN: Tensor, w: Quantized, out_dtype: torch.dtype) -> Tensor:
        exact = _exact_dtype(w.scale_format)
        dy = self.quantize_activation(dy_MN, w.scale_format)
        g_MN = ops.dequantize(dy.q, dy.s, 1, dy.block, exact)
        if w.scale_format == "mxfp8":
            assert w.for_dgrad is not None  # see ``quantize_weight_transposed``
            w_NK = ops.dequantize(w.for_dgrad.q, w.for_dgrad.s, w.block, 1, exact)
        else:
            w_NK = ops.dequantize(w.q, w.s, BLOCK, BLOCK, exact)
        return torch.mm(g_MN, w_NK).to(out_dtype)

    def wgrad(self, dy_MN: Tensor, x: Quantized, out_dtype: torch.dtype) -> Tensor:
        # torch.mm returns the dtype of its operands, so an FP32 dW needs FP32 operands
        exact = _exact_dtype(x.scale_format) if out_dtype == torch.bfloat16 else torch.float32
        x_MK = ops.dequantize(x.q, x.s, 1, x.block, torch.bfloat16)
        quantized = (self.quantize_tokens(t, x.scale_format) for t in (dy_MN, x_MK))
        g_MN, x_MK = (ops.dequantize(t.q, t.s, t.block, 1, exact) for t in quantized)
        return torch.mm(g_MN.t(), x_MK).to(out_dtype)

    def fingerprint(self, w_NK: Tensor) -> int | None:
        return ops.fingerprint(w_NK)


def _quantized(x: Tensor, layout: ScaleLayout, scale_format: ScaleFormat) -> Quantized:
    return Quantized(*ops.quantize(x, layout, scale_format != "fp32", block_of(scale_format)), layout, scale_format)


def _exact_dtype(scale_format: ScaleFormat) -> torch.dtype:
    """A dtype for q * s: BF16 is exact for powers of two (q has 4 significant bits). "fp32" needs FP32, rounded once.

    On a processor that does not multiply BF16, FP32 is ten times as fast. The sums are FP32 either way.
    """
    return torch.bfloat16 if scale_format != "fp32" and multiplies_bf16() else torch.float32
