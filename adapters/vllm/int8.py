"""INT8 in a rollout: exact integer products.

Weights have one scale per output channel and are installed as the trainer sends them; activations get one scale per
token. The product is exact in int32. On CUDA vLLM's own kernels serve where they can (that branch was not run on a
GPU yet), else torch's.
"""

from __future__ import annotations

import torch

from jetrl_patch.adapters.vllm.formats import LinearFormat
from jetrl_patch.adapters.vllm.scales import RowScales
from jetrl_patch.int8 import product
from jetrl_patch.int8.quantize import quantize_rows

__all__ = ["ChannelInt8"]


class ChannelInt8(LinearFormat):
    """int8 with a scale per output channel and per token."""

    dtype = torch.int8
    scales = RowScales()
    _mm: product.IntMM | None = None

    def check_width(self, name: str, K: int) -> None:
        """A layer can be too wide for an int32 sum."""
        product.check_width(name, K)

    def quantize(self, w_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scales [N, 1]."""
        return quantize_rows(w_NK)

    def product(self, x_MK: torch.Tensor, w_NK: torch.Tensor, scale: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
        """By vLLM's kernels on CUDA, else by torch's or the reference."""
        name = self.config.backend
        if x_MK.is_cuda and name != "torch" and out_dtype == torch.bfloat16:
            return _vllm_product(x_MK, w_NK, scale)
        if self._mm is None:
            self._mm = product.choose(name, x_MK.device.type)
        return product.fprop(x_MK, w_NK, scale, out_dtype, self._mm)


def _vllm_product(x_MK: torch.Tensor, w_NK: torch.Tensor, s_N1: torch.Tensor) -> torch.Tensor:
    """vLLM's quantizer and CUTLASS product (Triton for widths that CUTLASS does not take). Not run on a GPU yet."""
    from vllm import _custom_ops as ops

    q_MK, s_M1, _ = ops.scaled_int8_quant(x_MK.contiguous(), symmetric=True)
    return ops.cutlass_scaled_mm(q_MK, w_NK.t(), scale_a=s_M1, scale_b=s_N1, out_dtype=torch.bfloat16)
