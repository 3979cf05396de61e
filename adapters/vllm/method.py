"""The linear method of all jetrl_patch quantizations: it loads and multiplies a linear of any ``LinearFormat``.

Its parameters load the trainer's bytes and scales, or BF16 from a checkpoint, which they quantize. Both arrive as whole Hugging
Face weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase, register_weight_loader_v2_supported_method
from vllm.model_executor.parameter import ModelWeightParameter

from jetrl_patch.adapters.vllm.formats import format_of
from jetrl_patch.adapters.vllm.shards import Shard, hf_names, shards_of
from jetrl_patch.backends.quantize import Quantized
from jetrl_patch.backends.row_equality import TRAINED, Layout, Part
from jetrl_patch.config import Config
from jetrl_patch.errors import SyncError
from jetrl_patch.models.layers import cut_error


@register_weight_loader_v2_supported_method
class QuantizedLinearMethod(LinearMethodBase):
    """Loads and multiplies one quantized linear; ``format`` decides storage and GEMM.

    Args:
        packed: layers that vLLM merges -> their parts in a checkpoint.
        cut: collects the linears whose tensor-parallel split cuts a block. The first load raises an error about all of them.
    """

    def __init__(self, config: Config, prefix: str, packed: Mapping[str, list[str]], cut: list[str]) -> None:
        self.exact = config.exact
        self.prefix = prefix
        self.names = hf_names(prefix, packed)
        self.format = format_of(config)
        self.cut = cut
        engine = get_current_vllm_config_or_none()
        #: the largest number of rows in one step of the engine being built
        self.most = TRAINED if engine is None else engine.scheduler_config.max_num_batched_tokens

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
        """Register ``weight`` [N, K] and ``weight_scale_inv`` (FP32), with this rank's N and K."""
        assert isinstance(layer, LinearBase)
        n, k = sum(output_partition_sizes), input_size_per_partition
        self.format.check_width(self.names[0], k)
        if self.format.scales.cuts(k, input_size):
            self.cut.append(self.prefix)
        load = extra["weight_loader"]
        weight = torch.empty(n, k, dtype=self.format.dtype)
        loader = self._weight_loader(layer, load)
        layer.weight = ModelWeightParameter(data=weight, input_dim=1, output_dim=0, weight_loader=loader)
        layer.weight_scale_inv = self.format.scales.parameter(n, k, self._scale_loader(layer, load))

    def shards(self, layer: LinearBase) -> list[Shard]:
        """Return the Hugging Face rectangles in this rank's parameters."""
        return shards_of(layer, self.names)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Choose the GEMM. Raise ModelError before serving if the format's guarantee does not hold on this device."""
        layout = layout_of(layer, self.shards(layer)) if isinstance(layer, LinearBase) else None
        self.format.prepare(layer, layout, self.most)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor | Quantized, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``x [..., K]``, BF16 or quantized by a fused op -> ``[..., N]`` BF16: rounded once, then the bias is added in BF16."""
        if isinstance(x, Quantized):
            y = self._product(layer, x, torch.bfloat16)
        else:
            y = self._product(layer, x.reshape(-1, x.shape[-1]), torch.bfloat16).reshape(*x.shape[:-1], -1)
        return y if bias is None else y + bias

    def partial_sum(self, layer: torch.nn.Module, x: torch.Tensor | Quantized) -> torch.Tensor:
        """``x [M, K of this rank]`` BF16 or quantized -> this rank's unrounded FP32 part of the sum, ``[M, N]``."""
        return self._product(layer, x, torch.float32)

    def _product(self, layer: torch.nn.Module, x: torch.Tensor | Quantized, out_dtype: torch.dtype) -> torch.Tensor:
        w = self.format.weight(layer)
        if isinstance(x, Quantized):  # from the backend that ``format.producers`` returned
            return self.format.backend(w.q.device).fprop(x, w, out_dtype)
        return self.format.product(x, w, out_dtype)

    def _weight_loader(self, layer: LinearBase, load: Callable[..., None]) -> Callable[..., None]:
        def load_weight(param: torch.Tensor, loaded: torch.Tensor, *shard: Any, **kwargs: Any) -> None:
            self._check_split(layer)
            scales = None
            if loaded.dtype != self.format.dtype:
                found = self._find(layer, shard, kwargs)
                bf16_NK = finite_bf16(found.name if found else self.prefix, loaded)
                loaded, scales = self.format.quantize(bf16_NK.to(param.device))
            load(param, loaded, *shard, **kwargs)
            self.format.written(layer)
            if scales is not None:
                layer.weight_scale_inv.weight_loader(layer.weight_scale_inv, scales, *shard, **kwargs)

        return load_weight

    def _scale_loader(self, layer: LinearBase, load: Callable[..., None]) -> Callable[..., None]:
        def load_scale(param: torch.Tensor, loaded: torch.Tensor, *shard: Any, **kwargs: Any) -> None:
            self._check_split(layer)
            found = self._find(layer, shard, kwargs)
            rows = (found or self.shards(layer)[0]).rows  # a weight that is fused on disk has no shard
            loaded = self.format.scales.per_row(loaded, rows, found.name if found else self.prefix)
            load(param, loaded, *shard, **kwargs)
            self.format.written(layer)

        return load_scale

    def _find(self, layer: LinearBase, shard: tuple[Any, ...], kwargs: dict[str, Any]) -> Shard | None:
        wanted = shard[0] if shard else next(iter(kwargs.values()), None)
        return next((s for s in self.shards(layer) if s.shard_id == wanted), None)

    def _check_split(self, layer: LinearBase) -> None:
        # The whole model is built before the first load, so the list is complete.
        if self.cut:
            raise cut_error(self.cut, layer.tp_size, self.format.config.scales)


def layout_of(layer: LinearBase, shards: Sequence[Shard]) -> Layout:
    """Return how this rank's parameters are composed of the trainer's weights."""
    parts = tuple(Part(shard.rows, shard.row0, shard.row1, shard.offset) for shard in shards)
    return Layout(parts, layer.input_size // (shards[0].col1 - shards[0].col0))


def finite_bf16(name: str, loaded: torch.Tensor) -> torch.Tensor:
    """Return a weight in BF16. Raises SyncError with the layer's name if it has NaN or Inf."""
    bf16 = loaded.to(torch.bfloat16)
    if not torch.isfinite(bf16).all():
        raise SyncError(
            f"{name}.weight holds NaN or Inf and cannot be quantized. Check the checkpoint or the last optimizer step."
        )
    return bf16


def quantized_modules(model: torch.nn.Module) -> list[tuple[LinearBase, QuantizedLinearMethod]]:
    """Return the quantized linears of a built vLLM model with their methods, in module order."""
    found = []
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, QuantizedLinearMethod) and isinstance(module, LinearBase):
            found.append((module, method))
    return found
