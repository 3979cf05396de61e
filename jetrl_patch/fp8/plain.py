"""Experts in BF16, behind the interface of an FP8 backend: what ``exclude`` names, and what the precision guard moves.

The quantizer is the identity, with scales of 1 that nobody reads, so that ``experts`` computes the same sums over experts,
parts of a split included, on both sides. In exact mode a row's bits depend on that row alone.

Shape legend as in ``backends.base``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from jetrl_patch.exact import ops
from jetrl_patch.fp8.backends import Backend
from jetrl_patch.fp8.formats import ScaleFormat, groups

__all__ = ["PlainProducts"]


class PlainProducts(Backend):
    """BF16 products: with independent rows (``exact``), or torch's own."""

    name = "bf16"

    def __init__(self, exact: bool) -> None:
        self.exact = exact

    def quantize_activation(self, x_MK: Tensor, scale_format: ScaleFormat) -> tuple[Tensor, Tensor]:
        """The tokens themselves, BF16."""
        return x_MK.to(torch.bfloat16), _ones(x_MK, x_MK.shape[0], groups(x_MK.shape[1]))

    def quantize_tokens(self, x_MK: Tensor, scale_format: ScaleFormat) -> tuple[Tensor, Tensor]:
        """As ``quantize_activation``; no product needs it."""
        return x_MK.to(torch.bfloat16), _ones(x_MK, groups(x_MK.shape[0]), x_MK.shape[1])

    def quantize_weight(self, w_NK: Tensor, scale_format: ScaleFormat) -> tuple[Tensor, Tensor]:
        """The BF16 value of a weight."""
        return w_NK.detach().to(torch.bfloat16), _ones(w_NK, groups(w_NK.shape[0]), groups(w_NK.shape[1]))

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
        """[M, N] of BF16 operands, in BF16 or FP32. In exact mode FP32 is the unrounded sum."""
        assert splits == 1  # of experts, ``ranks`` forms the parts
        if not self.exact:
            return F.linear(q_MK, w_NK).to(out_dtype)
        product = ops.linear if out_dtype == torch.bfloat16 else ops.partial_sum
        return product(q_MK, w_NK)

    def dgrad(
        self,
        g_MN: Tensor,
        w_NK: Tensor,
        s_blocks: Tensor,
        scale_format: ScaleFormat,
        out_dtype: torch.dtype,
        w_KN: Tensor | None = None,
    ) -> Tensor:
        """dX [M, K], summed in FP32."""
        return torch.mm(g_MN.float(), w_NK.float()).to(out_dtype)

    def wgrad(
        self, g_MN: Tensor, q_MK: Tensor, s_MG: Tensor, scale_format: ScaleFormat, out_dtype: torch.dtype
    ) -> Tensor:
        """dW [N, K], summed in FP32."""
        return torch.mm(g_MN.float().t(), q_MK.float()).to(out_dtype)

    def fingerprint(self, w_NK: Tensor) -> int | None:
        """Nothing is kept of a weight."""
        return None


def _ones(like: Any, *shape: int) -> Tensor:
    return torch.ones((), dtype=torch.float32, device=like.device).expand(shape)
