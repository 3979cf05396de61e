"""The oracle: the three GEMMs of a linear layer in FP64, slow and independent of summation order.

A product of two e4m3fn values needs 8 bits, and a dot product of 128 of them fewer than FP64 holds. The dot product
of a block is therefore exact in any order. Shape legend as in ``quantize``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jetrl_patch.fp8.formats import BLOCK, groups, split_width
from jetrl_patch.fp8.operands import check_fprop


def fprop(
    q_MK: Tensor, s_MG: Tensor, w_NK: Tensor, s_NG: Tensor, out_dtype: torch.dtype, splits: int = 1
) -> Tensor:
    """Y [M, N] = round(sum over blocks kb, ascending, of fma(dot128(qX, qW), sX * sW, acc)).

    ``s_NG`` holds per-row weight scales [N, G]. ``splits`` > 1 adds the FP32 partial sums of that many equal
    ranges of K in ascending order, as a tensor-parallel rollout's all-reduce does.
    """
    check_fprop(q_MK, s_MG, w_NK, s_NG, out_dtype)
    (M, K), N = q_MK.shape, w_NK.shape[0]
    step = split_width(K, splits)
    x, w = q_MK.double(), w_NK.double()
    out: Tensor | None = None
    for start in range(0, K, step):
        acc = torch.zeros(M, N, dtype=torch.float64, device=q_MK.device)
        for k in range(start, min(start + step, K), BLOCK):
            dot = x[:, k : k + BLOCK] @ w[:, k : k + BLOCK].t()
            scale = (s_MG[:, k // BLOCK, None] * s_NG[None, :, k // BLOCK]).double()
            acc = (acc + dot * scale).float().double()  # FP32 accumulator, one rounding per block: an fma
        partial = acc.float()
        out = partial if out is None else out + partial
    assert out is not None
    return out.to(out_dtype)


def dgrad(g_MN: Tensor, s_MG: Tensor, w_NK: Tensor, s_blocks: Tensor) -> Tensor:
    """dX [M, K] FP64 = dY W from quantized operands: dY in 1x128 groups along N, W in its 128x128 blocks."""
    from jetrl_patch.fp8.quantize import dequantize_activation, dequantize_weight

    return dequantize_activation(g_MN, s_MG, torch.float64) @ dequantize_weight(w_NK, s_blocks, torch.float64)


def wgrad(g_MN: Tensor, gs: Tensor, x_MK: Tensor, xs: Tensor) -> Tensor:
    """dW [N, K] FP64 = dY^T X from operands quantized in groups of 128 tokens (scales [ceil(M / 128), .])."""
    from jetrl_patch.fp8.quantize import dequantize_tokens

    assert gs.shape[0] == xs.shape[0] == groups(x_MK.shape[0])
    return dequantize_tokens(g_MN, gs, torch.float64).t() @ dequantize_tokens(x_MK, xs, torch.float64)
