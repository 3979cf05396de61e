"""DGrad and WGrad in FP64 from quantized operands."""

from __future__ import annotations

import torch
from torch import Tensor

from jetrl_patch.backends.quantize import dequantize_activation, dequantize_tokens, dequantize_weight
from jetrl_patch.kernels.formats import BLOCK


def dgrad(g_MN: Tensor, s_MG: Tensor, w_NK: Tensor, s_blocks: Tensor) -> Tensor:
    """dX [M, K] = dY W: dY in 1x128 groups along N, W in its 128x128 blocks."""
    return dequantize_activation(g_MN, s_MG, torch.float64) @ dequantize_weight(w_NK, s_blocks, torch.float64)


def dgrad_mx(g_MN: Tensor, s_MG: Tensor, w_NK: Tensor, s_GK: Tensor) -> Tensor:
    """dX [M, K] = dY W of MXFP8 operands, both in groups of 32 along N."""
    g = dequantize_activation(g_MN, s_MG, torch.float64, 32)
    return g @ dequantize_tokens(w_NK, s_GK, torch.float64, 32)


def wgrad(g_MN: Tensor, gs: Tensor, x_MK: Tensor, xs: Tensor, block: int = BLOCK) -> Tensor:
    """dW [N, K] = dY^T X of operands in groups of 128 tokens, with scales [ceil(M / 128), .]."""
    assert gs.shape[0] == xs.shape[0] == -(-x_MK.shape[0] // block)
    return dequantize_tokens(g_MN, gs, torch.float64, block).t() @ dequantize_tokens(x_MK, xs, torch.float64, block)
