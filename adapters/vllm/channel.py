"""A rollout's linears with one scale per output channel and per token: FP8 here, INT8 in ``int8.py``.

A layer holds ``weight [N, K]`` and FP32 ``weight_scale_inv [N, 1]`` (what a byte is multiplied with, as in the block
format). Slices of rows carry their scales; a slice along K (row-parallel) keeps the scale of the whole row, because
weights are quantized before they are sliced, while each rank's activations have the scale of its own slice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearBase, register_weight_loader_v2_supported_method
from vllm.model_executor.parameter import ChannelQuantScaleParameter, ModelWeightParameter

from jetrl_patch.adapters.vllm.quant import JetrlFp8LinearMethod
from jetrl_patch.errors import SyncError
from jetrl_patch.fp8 import channel
from jetrl_patch.fp8.formats import FP8

__all__ = ["JetrlChannelLinearMethod"]


@register_weight_loader_v2_supported_method
class JetrlChannelLinearMethod(JetrlFp8LinearMethod):
    """Loads and multiplies one linear in e4m3 with a scale per row."""

    dtype = FP8
    channelwise = True

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        """Registers ``weight`` [N, K] and ``weight_scale_inv`` FP32 [N, 1], N and K of this rank."""
        assert isinstance(layer, LinearBase)
        n, k = sum(output_partition_sizes), input_size_per_partition
        load = extra["weight_loader"]
        layer.weight = ModelWeightParameter(
            data=torch.empty(n, k, dtype=self.dtype),
            input_dim=1,
            output_dim=0,
            weight_loader=self._weight_loader(layer, load),
        )
        layer.weight_scale_inv = ChannelQuantScaleParameter(
            data=torch.ones(n, 1, dtype=torch.float32), output_dim=0, weight_loader=self._scale_loader(layer, load)
        )

    def quantize(self, w_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A whole BF16 weight [N, K] -> bytes [N, K] and scales [N, 1]."""
        return channel.quantize_rows(w_NK, self.scale_format)

    def _product(self, layer: torch.nn.Module, x_MK: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
        weight_NK, scale_N1 = layer.weight.data, layer.weight_scale_inv.data
        return channel.fprop(self.backend(x_MK.device), x_MK, weight_NK, scale_N1, self.scale_format, out_dtype)

    def _scale_loader(self, layer: LinearBase, load: Callable[..., None]) -> Callable[..., None]:
        def load_scale(param: torch.Tensor, loaded: torch.Tensor, *shard: Any, **kwargs: Any) -> None:
            rows = self._whole(layer, shard, kwargs)
            if tuple(loaded.shape) != (rows, 1):
                raise SyncError(
                    f"{self._hf_name(layer, shard, kwargs)}.weight_scale_inv: expected one scale for each of {rows} "
                    f"rows, but got shape {list(loaded.shape)}"
                )
            load(param, loaded, *shard, **kwargs)

        return load_scale
