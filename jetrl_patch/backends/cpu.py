"""The backends that run anywhere: the C kernels on a CPU, and the reference formulas on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from jetrl_patch.backends import quantize
from jetrl_patch.backends.base import Backend
from jetrl_patch.kernels.formats import BLOCK, ScaleFormat
from jetrl_patch.native import ops
from jetrl_patch.native.build import multiplies_bf16

# ---- The torch backend: the reference formulas, unchanged, on any device. Slow, but always available

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
        return quantize.fprop(q_MK, s_MG, w_NK, s_NG, out_dtype, splits)

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
        return quantize.dgrad(q, s, w_NK, s_blocks).to(out_dtype)

    def wgrad(
        self, g_MN: Tensor, q_MK: Tensor, s_MG: Tensor, scale_format: ScaleFormat, out_dtype: torch.dtype
    ) -> Tensor:
        x = quantize.dequantize_activation(q_MK, s_MG, torch.bfloat16)
        return quantize.wgrad(
            *self.quantize_tokens(g_MN, scale_format), *self.quantize_tokens(x, scale_format)
        ).to(out_dtype)

    def fingerprint(self, w_NK: Tensor) -> int | None:
        return None


# ---- The CPU backend: C kernels for the quantizers and FProp, torch matmuls on exact BF16 operands for the gradients

class NativeBackend(Backend):
    """Rows are independent by construction (see ``kernels.c``)."""

    name = "native"

    def quantize_activation(self, x_MK: Tensor, scale_format: ScaleFormat) -> tuple[Tensor, Tensor]:
        return ops.quantize_rows(x_MK, scale_format == "pow2")

    def quantize_tokens(self, x_MK: Tensor, scale_format: ScaleFormat) -> tuple[Tensor, Tensor]:
        return ops.quantize_tokens(x_MK, scale_format == "pow2")

    def quantize_weight(self, w_NK: Tensor, scale_format: ScaleFormat) -> tuple[Tensor, Tensor]:
        return ops.quantize_blocks(w_NK.to(torch.bfloat16), scale_format == "pow2")

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
        return ops.fp8_gemm(q_MK, s_MG, w_NK, s_NG, out_dtype, splits)

    def pack(self, w_NK: Tensor) -> Tensor | None:
        return ops.pack(w_NK)

    def packed_gemm(
        self, q_MK: Tensor, s_MG: Tensor, w_NK: Tensor, s_NG: Tensor, packed: Tensor, out_dtype: torch.dtype
    ) -> Tensor:
        return ops.fp8_gemm(q_MK, s_MG, w_NK, s_NG, out_dtype, packed=packed)

    def dgrad(
        self,
        g_MN: Tensor,
        w_NK: Tensor,
        s_blocks: Tensor,
        scale_format: ScaleFormat,
        out_dtype: torch.dtype,
        w_KN: Tensor | None = None,
    ) -> Tensor:
        exact = _exact_dtype(scale_format)
        q, s = self.quantize_activation(g_MN, scale_format)
        g = ops.dequantize(q, s, 1, BLOCK, exact)  # [M, N]
        w = ops.dequantize(w_NK, s_blocks, BLOCK, BLOCK, exact)  # [N, K]
        return torch.mm(g, w).to(out_dtype)

    def wgrad(
        self, g_MN: Tensor, q_MK: Tensor, s_MG: Tensor, scale_format: ScaleFormat, out_dtype: torch.dtype
    ) -> Tensor:
        # FP32 operands keep the FP32 sums
        exact = _exact_dtype(scale_format) if out_dtype == torch.bfloat16 else torch.float32
        x = ops.dequantize(q_MK, s_MG, 1, BLOCK, torch.bfloat16)
        x = ops.dequantize(*self.quantize_tokens(x, scale_format), BLOCK, 1, exact)  # [M, K]
        g = ops.dequantize(*self.quantize_tokens(g_MN, scale_format), BLOCK, 1, exact)  # [M, N]
        return torch.mm(g.t(), x).to(out_dtype)

    def fingerprint(self, w_NK: Tensor) -> int | None:
        return ops.fingerprint(w_NK)


def _exact_dtype(scale_format: ScaleFormat) -> torch.dtype:
    """A dtype for q * s: BF16 is exact for "pow2" (4 significant bits times a power of two); "fp32" needs FP32, rounded once.

    Where the processor does not multiply BF16, FP32 takes a tenth of the time, and the sums are FP32 in either case.
    """
    return torch.bfloat16 if scale_format == "pow2" and multiplies_bf16() else torch.float32
