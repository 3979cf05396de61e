"""The CPU backend: C kernels for the quantizers and FProp, torch products of exact BF16 operands for the gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from jetrl_patch.backends.base import Backend
from jetrl_patch.backends.quantize import Quantized, ScaleLayout
from jetrl_patch.config.formats import FORMATS, ScaleFormat
from jetrl_patch.kernels.formats import BLOCK
from jetrl_patch.native import ops
from jetrl_patch.native.build import multiplies_bf16


class NativeBackend(Backend):
    """Rows are independent by construction (see ``kernels.c``)."""

    name = "native"

    def quantize_activation(self, x_MK: Tensor, scale_format: ScaleFormat) -> Quantized:
        if FORMATS[scale_format].two_levels:
            return super().quantize_activation(x_MK, scale_format)
        return _quantized(x_MK, "rows", scale_format)

    def quantize_tokens(self, x_MK: Tensor, scale_format: ScaleFormat) -> Quantized:
        return _quantized(x_MK, "tokens", scale_format)

    def quantize_weight(self, w_NK: Tensor, scale_format: ScaleFormat) -> Quantized:
        if FORMATS[scale_format].two_levels:
            return super().quantize_weight(w_NK, scale_format)
        return _quantized(w_NK.to(torch.bfloat16), "blocks" if FORMATS[scale_format].square else "rows", scale_format)

    def gemm(self, x: Quantized, w: Quantized, out_dtype: torch.dtype, splits: int = 1) -> Tensor:
        packed = w.packed if splits == 1 else None
        return ops.fp8_gemm(x.q, x.s_rows, w.q, w.s_rows, out_dtype, splits, packed, w.block)

    def pack(self, w: Quantized) -> Tensor | None:
        return ops.pack(w.q)

    def exact_dtype(self, scale_format: ScaleFormat, out_dtype: torch.dtype) -> torch.dtype:
        """BF16 holds q * s of powers of two (q has 4 significant bits). Others need FP32, rounded once, as does an FP32 result.

        On a processor that does not multiply BF16, FP32 is ten times as fast. The sums are FP32 either way.
        """
        exact = FORMATS[scale_format].powers_of_two and out_dtype == torch.bfloat16
        return torch.bfloat16 if exact and multiplies_bf16() else torch.float32

    def dequantized(self, x: Quantized, dtype: torch.dtype) -> Tensor:
        groups = {"rows": (1, x.block), "tokens": (x.block, 1), "blocks": (BLOCK, BLOCK)}
        return ops.dequantize(x.q, x.s, *groups[x.layout], dtype)

    def fingerprint(self, w_NK: Tensor) -> int | None:
        return ops.fingerprint(w_NK)


def _quantized(x: Tensor, layout: ScaleLayout, scale_format: ScaleFormat) -> Quantized:
    form = FORMATS[scale_format]
    return Quantized(*ops.quantize(x, layout, form.powers_of_two, form.block), layout, scale_format)
