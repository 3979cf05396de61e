"""The rollout's INT8 linears as an out-of-tree vLLM quantization, ``quantization="jetrl_int8"``.

Weights have one scale per output channel and are installed as the trainer sends them; activations get one scale per
token. The product is exact in int32. On CUDA vLLM's own kernels serve where they can (that branch was not run on a
GPU yet), else torch's.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.linear import register_weight_loader_v2_supported_method

from jetrl_patch.adapters.vllm.channel import JetrlChannelLinearMethod
from jetrl_patch.adapters.vllm.quant import INT8_NAME, JetrlFp8Config
from jetrl_patch.int8 import product
from jetrl_patch.int8.quantize import quantize_rows

__all__ = ["JetrlInt8Config", "JetrlInt8LinearMethod"]


class JetrlInt8Config(JetrlFp8Config):
    """As the FP8 one, under its own name."""

    quantization = INT8_NAME

    @classmethod
    def get_min_capability(cls) -> int:
        return 75


@register_weight_loader_v2_supported_method
class JetrlInt8LinearMethod(JetrlChannelLinearMethod):
    """Loads and multiplies one INT8 linear."""

    dtype = torch.int8
    _mm: product.IntMM | None = None

    def create_weights(self, layer: torch.nn.Module, input_size_per_partition: int, *sizes: Any, **extra: Any) -> None:
        """As in FP8, with int8. Raises ModelError for a layer that is too wide for an int32 sum."""
        product.check_width(self.names[0], input_size_per_partition)
        super().create_weights(layer, input_size_per_partition, *sizes, **extra)

    def quantize(self, w_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A whole BF16 weight [N, K] -> int8 [N, K] and scales [N, 1]."""
        return quantize_rows(w_NK)

    def _product(self, layer: torch.nn.Module, x_MK: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
        weight_NK, scale_N1 = layer.weight.data, layer.weight_scale_inv.data
        name = self.quant_config.config.backend
        if x_MK.is_cuda and name != "torch" and out_dtype == torch.bfloat16:
            return _vllm_product(x_MK, weight_NK, scale_N1)
        if self._mm is None:
            self._mm = product.choose(name, x_MK.device.type)
        return product.fprop(x_MK, weight_NK, scale_N1, out_dtype, self._mm)


def _vllm_product(x_MK: torch.Tensor, w_NK: torch.Tensor, s_N1: torch.Tensor) -> torch.Tensor:
    """vLLM's quantizer and CUTLASS product (Triton for widths that CUTLASS does not take). Not run on a GPU yet."""
    from vllm import _custom_ops as ops

    q_MK, s_M1, _ = ops.scaled_int8_quant(x_MK.contiguous(), symmetric=True)
    return ops.cutlass_scaled_mm(q_MK, w_NK.t(), scale_a=s_M1, scale_b=s_N1, out_dtype=torch.bfloat16)
