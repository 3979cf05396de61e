"""This project's Triton kernels for Hopper: the contract's formula in FP8 ``wgmma``."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from jetrl_patch.backends.gpu import GpuBackend
from jetrl_patch.backends.quantize import QuantizedWeight
from jetrl_patch.kernels.formats import ScaleFormat


class TritonBackend(GpuBackend):
    """Rows are independent by construction (see ``kernels.gemm``). The first product imports triton."""

    name = "triton"
    blocks = True

    def quantizers(self, x: Tensor) -> Any:
        return importlib.import_module("jetrl_patch.kernels.quantize")  # always these kernels: no fallback to torch

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
        from jetrl_patch.kernels.gemm import fprop

        return fprop(q_MK, s_MG, w_NK, s_NG, out_dtype, splits, s_blocks)

    def product(
        self, q_MK: Tensor, s_MG: Tensor, w: QuantizedWeight, out_dtype: torch.dtype, splits: int = 1
    ) -> Tensor:
        from jetrl_patch.kernels.gemm import fprop

        return fprop(q_MK, s_MG, w.q, None, out_dtype, splits, w.s_blocks)

    def block_scales(self, s_NG: Tensor) -> Tensor:
        """One launch; NaN for a block whose rows differ."""
        from jetrl_patch.kernels.gemm_common import block_scales

        return block_scales(s_NG)

    def few(self) -> int:
        """The largest M for which one launch quantizes and multiplies."""
        from jetrl_patch.kernels import gemm, gemm_common

        return min(gemm.FEW_TOKENS, gemm_common.few_rows())

    def give_up_few_rows(self) -> bool:
        """One tile for every number of rows."""
        from jetrl_patch.kernels import gemm_common

        return gemm_common.give_up_few_rows()

    def compiled_rows(self, most: int) -> Sequence[int]:
        """Quantized in the product; or before it, by the quantizer's two tiles, for one of the product's two."""
        from jetrl_patch.kernels import gemm_common, quantize

        return [rows for rows in (1, self.few() + 1, gemm_common.FEW_ROWS + 1, quantize.FEW + 1) if rows <= most]

    def fprop(
        self,
        x_MK: Tensor,
        w_NK: Tensor,
        s_NG: Tensor,
        scale_format: ScaleFormat,
        out_dtype: torch.dtype = torch.bfloat16,
        splits: int = 1,
        s_blocks: Tensor | None = None,
    ) -> Tensor:
        """As the base class. Few rows are quantized inside the product: one launch, the same bits (``kernels.gemm``)."""
        # Only the trainer has splits > 1: each rank of a rollout holds one range of K.
        if splits == 1 and not torch.compiler.is_compiling() and x_MK.shape[0] <= self.few():
            from jetrl_patch.kernels import gemm

            return gemm.fprop_few(x_MK, w_NK, s_NG, scale_format, out_dtype, s_blocks)
        return super().fprop(x_MK, w_NK, s_NG, scale_format, out_dtype, splits, s_blocks)

    def dgrad_product(
        self,
        g_MN: Tensor,
        s_MG: Tensor,
        w_NK: Tensor,
        s_blocks: Tensor,
        out_dtype: torch.dtype,
        w_KN: Tensor | None = None,
    ) -> Tensor:
        from jetrl_patch.kernels.gemm_backward import dgrad

        return dgrad(g_MN, s_MG, w_NK, s_blocks, out_dtype, w_KN)

    def wgrad_product(self, g_NM: Tensor, sg: Tensor, x_KM: Tensor, sx: Tensor, out_dtype: torch.dtype) -> Tensor:
        from jetrl_patch.kernels.gemm_backward import wgrad

        return wgrad(g_NM, sg, x_KM, sx, out_dtype)

    def add_wgrad_product(self, g_NM: Tensor, sg: Tensor, x_KM: Tensor, sx: Tensor, main: Tensor) -> None:
        """The kernel adds where it would write."""
        if not main.is_contiguous():
            return super().add_wgrad_product(g_NM, sg, x_KM, sx, main)
        from jetrl_patch.kernels.gemm_backward import wgrad

        wgrad(g_NM, sg, x_KM, sx, add_to=main)
