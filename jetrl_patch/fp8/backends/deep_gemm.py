"""DeepGEMM on Hopper, installed separately or bundled with a CUDA build of vLLM.

``fp8_gemm_nt((a [M, K], sa [M, K/128]), (b [N, K], sb), d [M, N], c)``, all row-major with K contiguous:

| recipe        | sb               | d    | c                        | used for                       |
| (1, 128, 128) | [N/128, K/128]   | BF16 | none                     | FProp, DGrad                   |
| (1, 1, 128)   | [N, K/128]       | FP32 | required, d adds to it   | FP32 partial sums, WGrad       |

Row scales are read with adjacent rows, strides (1, M); DeepGEMM converts other layouts with an extra kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jetrl_patch.errors import ConfigError
from jetrl_patch.fp8.backends.capability import find_deep_gemm
from jetrl_patch.fp8.backends.gpu import GpuBackend, check_widths, turned
from jetrl_patch.fp8.formats import BLOCK, split_width
from jetrl_patch.fp8.operands import check_fprop

BLOCKS, ROWS = (1, 128, 128), (1, 1, 128)


class DeepGemmBackend(GpuBackend):
    """Looks for the module on construction."""

    name = "deep_gemm"
    columns = True

    def __init__(self) -> None:
        module, reason = find_deep_gemm()
        if module is None:
            raise ConfigError(f'backend="deep_gemm" cannot run here: {reason}. Use a CUDA build of vLLM, or backend="triton".')
        self._module: Any = module

    def gemm(
        self, q_MK: Tensor, s_MG: Tensor, w_NK: Tensor, s_NG: Tensor, out_dtype: torch.dtype, splits: int = 1
    ) -> Tensor:
        check_fprop(q_MK, s_MG, w_NK, s_NG, out_dtype)
        (M, K), N = q_MK.shape, w_NK.shape[0]
        step = split_width(K, splits)
        check_widths(self.name, K, N)
        if splits == 1 and out_dtype == torch.bfloat16:
            y = q_MK.new_empty(M, N, dtype=torch.bfloat16)
            self._module.fp8_gemm_nt((q_MK, s_MG), (w_NK, self._block_scales(s_NG)), y, recipe=BLOCKS)
            return y
        total: Tensor | None = None
        for k in range(0, K, step):
            g = slice(k // BLOCK, -(-(k + step) // BLOCK))
            q, w = q_MK[:, k : k + step], w_NK[:, k : k + step]
            part = self._rows(q, s_MG[:, g], w, s_NG[:, g])
            total = part if total is None else total + part
        assert total is not None
        return total.to(out_dtype)

    def dgrad_product(self, g_MN: Tensor, s_MG: Tensor, w_NK: Tensor, s_blocks: Tensor, out_dtype: torch.dtype) -> Tensor:
        check_widths(self.name, *w_NK.shape)
        dx = g_MN.new_empty(g_MN.shape[0], w_NK.shape[1], dtype=torch.bfloat16)
        self._module.fp8_gemm_nt((g_MN, s_MG), (turned(w_NK), s_blocks.t().contiguous()), dx, recipe=BLOCKS)
        return dx.to(out_dtype)

    def wgrad_product(self, g_NM: Tensor, sg: Tensor, x_KM: Tensor, sx: Tensor, out_dtype: torch.dtype) -> Tensor:
        check_widths(self.name, g_NM.shape[0], x_KM.shape[0])
        return self._rows(g_NM, sg.t(), x_KM, sx.t()).to(out_dtype)

    def _block_scales(self, s_NG: Tensor) -> Tensor:
        if self.quantizers(s_NG) is None:
            return block_scales(s_NG)
        from jetrl_patch.kernels.gemm_scales import block_scales as in_one_launch

        return in_one_launch(s_NG)

    def _rows(self, a: Tensor, sa: Tensor, b: Tensor, sb: Tensor) -> Tensor:
        """The FP32 product of operands with one scale per row and group."""
        d = a.new_zeros(a.shape[0], b.shape[0], dtype=torch.float32)
        self._module.fp8_gemm_nt((a, sa), (b, sb), d, c=d, recipe=ROWS)
        return d


def block_scales(s_NG: Tensor) -> Tensor:
    """Convert per-row scales [N, G] to block scales [ceil(N/128), G].

    A block whose rows have different scales (a slice of rows that starts inside a block) has no block scale. It gets NaN,
    which stays visible, rather than a wrong number, and needs no read-back to the host.
    """
    N, G = s_NG.shape
    whole = N // BLOCK * BLOCK
    low, high = s_NG[:whole].view(N // BLOCK, BLOCK, G).aminmax(dim=1)
    if whole < N:
        rest = s_NG[whole:].aminmax(dim=0)
        low, high = torch.cat((low, rest.min[None])), torch.cat((high, rest.max[None]))
    return torch.where(low == high, low, torch.nan)
