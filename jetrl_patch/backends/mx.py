"""The backend of MXFP8 on Blackwell: a Triton FProp, and torch for the rest. Compiled and interpreted, not yet run on a GPU."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from jetrl_patch.backends import quantize
from jetrl_patch.backends.base import Backend
from jetrl_patch.backends.gpu import opaque_fprop, written
from jetrl_patch.backends.quantize import Quantized
from jetrl_patch.kernels.formats import MX_BLOCK, split_width


class MxBackend(Backend):
    """The quantizers are the reference formulas. The gradients are torch's products of q * s, which BF16 holds exactly."""

    name = "mx"

    def gemm(self, x: Quantized, w: Quantized, out_dtype: torch.dtype, splits: int = 1) -> Tensor:
        from jetrl_patch.kernels.gemm_mx import fprop

        if splits == 1:
            return fprop(x.q, x.s_rows, w.q, w.s_rows, out_dtype)
        K = x.shape[1]
        step = split_width(K, splits, MX_BLOCK)
        ranges = ((x.columns(k, k + step), w.columns(k, k + step)) for k in range(0, K, step))
        parts = (fprop(a.q, a.s, b.q, b.s, torch.float32) for a, b in ranges)
        return functools.reduce(torch.add, parts).to(out_dtype)

    def fprop(
        self, x_MK: Tensor | Quantized, w: Quantized, out_dtype: torch.dtype = torch.bfloat16, splits: int = 1
    ) -> Tensor:
        """As the base class, but one opaque operator in a compiled graph."""
        if torch.compiler.is_compiling():
            return opaque_fprop(self.name, x_MK, w, out_dtype, splits)
        return super().fprop(x_MK, w, out_dtype, splits)

    def dgrad(self, dy_MN: Tensor, w: Quantized, out_dtype: torch.dtype) -> Tensor:
        assert w.for_dgrad is not None  # every weight of a trainer in this format has it
        exact = written(out_dtype)  # torch.mm returns the dtype of its operands
        dy = self.quantize_activation(dy_MN, w.scale_format)
        g_MN = quantize.dequantize_activation(dy.q, dy.s, exact, MX_BLOCK)
        return torch.mm(g_MN, quantize.dequantize_tokens(w.for_dgrad.q, w.for_dgrad.s, exact, MX_BLOCK)).to(out_dtype)

    def wgrad(self, dy_MN: Tensor, x: Quantized, out_dtype: torch.dtype) -> Tensor:
        exact = written(out_dtype)
        x_MK = quantize.dequantize_activation(x.q, x.s, torch.bfloat16, MX_BLOCK)
        quantized = (self.quantize_tokens(t, x.scale_format) for t in (dy_MN, x_MK))
        g_MN, x_MK = (quantize.dequantize_tokens(t.q, t.s, exact, MX_BLOCK) for t in quantized)
        return torch.mm(g_MN.t(), x_MK).to(out_dtype)
