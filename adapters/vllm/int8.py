"""INT8 in the rollout: exact integer GEMMs.

Weights have one scale per output channel and are installed as the trainer sends them; activations have one scale per
token. The GEMM is exact in int32. On CUDA it uses vLLM's own kernels where they apply (not yet run on a GPU), else
torch's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from jetrl_patch.adapters.vllm.formats import LinearFormat
from jetrl_patch.adapters.vllm.scales import RowScales
from jetrl_patch.fp8.backends.row_equality import TRAINED
from jetrl_patch.int8 import product
from jetrl_patch.int8.quantize import quantize_rows

if TYPE_CHECKING:
    from jetrl_patch.fp8.backends.row_equality import Layout

__all__ = ["ChannelInt8"]


class ChannelInt8(LinearFormat):
    """int8 with per-channel weight scales and per-token activation scales."""

    dtype = torch.int8
    scales = RowScales()
    _mm: product.IntMM | None = None

    def check_width(self, name: str, K: int) -> None:
        """Raise ModelError for a layer too wide for an int32 sum."""
        product.check_width(name, K)

    def check_serving(self, weight: torch.Tensor, layout: Layout | None = None, most: int = TRAINED) -> None:
        """Choose the integer product."""
        self._mm = product.choose(self.config.backend, weight.device.type)

    def compiled_rows(self, device: torch.device, most: int) -> Sequence[int]:
        """Return nothing: vLLM's kernels are in its wheel."""
        return ()

    def quantize(self, w_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scales [N, 1]."""
        return quantize_rows(w_NK)

    def product(
        self,
        x_MK: torch.Tensor,
        w_NK: torch.Tensor,
        scale: torch.Tensor,
        out_dtype: torch.dtype,
        blocks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Use vLLM's kernels on CUDA, else torch's or the reference."""
        name = self.config.backend
        if x_MK.is_cuda and name != "torch" and out_dtype == torch.bfloat16:
            return _vllm_product(x_MK, w_NK, scale)
        if self._mm is None:
            self._mm = product.choose(name, x_MK.device.type)
        return product.fprop(x_MK, w_NK, scale, out_dtype, self._mm)


def _vllm_product(x_MK: torch.Tensor, w_NK: torch.Tensor, s_N1: torch.Tensor) -> torch.Tensor:
    """Use vLLM's quantizer and CUTLASS GEMM (Triton for widths CUTLASS does not support). Not yet run on a GPU."""
    from vllm import _custom_ops as ops

    q_MK, s_M1, _ = ops.scaled_int8_quant(x_MK.contiguous(), symmetric=True)
    return ops.cutlass_scaled_mm(q_MK, w_NK.t(), scale_a=s_M1, scale_b=s_N1, out_dtype=torch.bfloat16)
