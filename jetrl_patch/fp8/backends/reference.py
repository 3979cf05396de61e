"""The torch backend: the reference formulas, unchanged, on any device. Slow, but always available."""

from __future__ import annotations

import torch
from torch import Tensor

from jetrl_patch.fp8 import quantize, reference
from jetrl_patch.fp8.backends.base import Backend
from jetrl_patch.fp8.formats import ScaleFormat


class TorchBackend(Backend):
    """Sums each block in FP64, exactly and in any order, so rows cannot depend on their neighbours."""

    name = "torch"

    def quantize_activation(self, x_MK: Tensor, scale_format: ScaleFormat) -> tuple[Tensor, Tensor]:
        return quantize.quantize_activation(x_MK, scale_format)

    def quantize_tokens(self, x_MK: Tensor, scale_format: ScaleFormat) -> tuple[Tensor, Tensor]:
        return quantize.quantize_tokens(x_MK, scale_format)

    def quantize_weight(self, w_NK: Tensor, scale_format: ScaleFormat) -> tuple[Tensor, Tensor]:
        return quantize.quantize_weight(w_NK, scale_format)

    def gemm(
        self,
        q_MK: Tensor,
        s_MG: Tensor,
        w_NK: Tensor,
        s_NG: Tensor,
        out_dtype: torch.dtype,
        splits: int = 1,
        s_blocks: Tensor | None = None,
    ) -> Tensor:
        return reference.fprop(q_MK, s_MG, w_NK, s_NG, out_dtype, splits)

    def dgrad(
        self,
        g_MN: Tensor,
        w_NK: Tensor,
        s_blocks: Tensor,
        scale_format: ScaleFormat,
        out_dtype: torch.dtype,
        w_KN: Tensor | None = None,
    ) -> Tensor:
        q, s = self.quantize_activation(g_MN, scale_format)
        return reference.dgrad(q, s, w_NK, s_blocks).to(out_dtype)

    def wgrad(
        self, g_MN: Tensor, q_MK: Tensor, s_MG: Tensor, scale_format: ScaleFormat, out_dtype: torch.dtype
    ) -> Tensor:
        x = quantize.dequantize_activation(q_MK, s_MG, torch.bfloat16)
        return reference.wgrad(
            *self.quantize_tokens(g_MN, scale_format), *self.quantize_tokens(x, scale_format)
        ).to(out_dtype)

    def fingerprint(self, w_NK: Tensor) -> int | None:
        return None
