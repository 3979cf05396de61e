"""The rollout's FP8 linears as an out-of-tree vLLM quantization, ``quantization="jetrl_fp8"``.

A layer holds FP8 ``weight [N, K]`` and FP32 ``weight_scale_inv [N, G]`` with G = ceil(K/128): the scale of a 128x128
block stands once per row. Rows then carry everything they need, so any fused (qkv, gate_up) or tensor-parallel slice
is a plain ``narrow``, and widths need not be multiples of 128. vLLM's own block layout cannot do that: it refuses
fused layers whose parts are not multiples of 128.

Both parameters take what the trainer sends (FP8 bytes and block scales ``[ceil(N/128), G]``) and what a checkpoint
holds (BF16, quantized here), always for the whole Hugging Face weight: quantization comes *before* slicing, so the
bytes do not depend on the tensor-parallel degree.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.model_executor.layers.linear import (
    LinearBase,
    LinearMethodBase,
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.parameter import ModelWeightParameter

from jetrl_patch import runtime
from jetrl_patch.adapters.vllm.head import ExactHeadMethod, ExactLinearMethod
from jetrl_patch.adapters.vllm.shards import Shard, hf_names, shards_of
from jetrl_patch.errors import ConflictError, ModelError, NotPatchedError, SyncError
from jetrl_patch.fp8.backends import choose_backend, get_backend
from jetrl_patch.fp8.backends.row_equality import require_row_equality
from jetrl_patch.fp8.formats import BLOCK, FP8
from jetrl_patch.fp8.layers import is_quantized
from jetrl_patch.fp8.quantize import expand_weight_scale

if TYPE_CHECKING:
    from jetrl_patch.config import Config
    from jetrl_patch.fp8.backends import Backend

__all__ = [
    "INT8_NAME",
    "NAME",
    "JetrlFp8Config",
    "JetrlFp8LinearMethod",
    "cut_error",
    "quantization_name",
    "quantized_modules",
]

NAME = "jetrl_fp8"
INT8_NAME = "jetrl_int8"


def quantization_name(config: Config) -> str:
    """What vLLM calls our quantization in this mode."""
    return INT8_NAME if config.precision == "int8-rollout" else NAME


class JetrlFp8Config(QuantizationConfig):
    """vLLM's handle on our settings. It travels pickled to every worker; the worker's own settings must equal it."""

    quantization: ClassVar[str] = NAME

    def __init__(self) -> None:
        super().__init__()
        self.config = runtime.active_config()
        self.cut: list[str] = []

    def get_name(self) -> str:
        return self.quantization

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 89

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> JetrlFp8Config:
        return cls()

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> None:
        """Called when the checkpoint names a quantization of its own. Raises ConflictError if ours was asked for."""
        if user_quant == cls.quantization:
            raise ConflictError(
                f"quantization: required {user_quant!r}, but the checkpoint's config.json says "
                f"quant_method={hf_quant_cfg.get('quant_method')!r}; use the BF16 checkpoint"
            )

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """FP8 (or INT8) for the linears of the blocks, exact BF16 for the head and for what ``exclude`` names."""
        self._require_patched()
        if isinstance(layer, LinearBase):
            if self.is_quantized(prefix):
                return self._linear_method(prefix)
            return ExactLinearMethod() if self.config.exact else UnquantizedLinearMethod()
        if isinstance(layer, VocabParallelEmbedding) and self.config.exact:
            return ExactHeadMethod(self.config.fp32_head)
        return None

    def _linear_method(self, prefix: str) -> JetrlFp8LinearMethod:
        if self.config.precision == "int8-rollout":
            from jetrl_patch.adapters.vllm.int8 import JetrlInt8LinearMethod

            return JetrlInt8LinearMethod(self, prefix)
        if self.config.channelwise:
            from jetrl_patch.adapters.vllm.channel import JetrlChannelLinearMethod

            return JetrlChannelLinearMethod(self, prefix)
        return JetrlFp8LinearMethod(self, prefix)

    def _require_patched(self) -> None:
        """This config may arrive, pickled, in a process that loaded no plugin (``VLLM_PLUGINS`` can do that)."""
        from jetrl_patch.adapters.vllm.adapter import ADAPTER

        runtime.require_active("the vLLM worker", self.config)
        if not ADAPTER.installed:
            raise NotPatchedError(
                f"this vLLM worker (pid {os.getpid()}) got quantization={self.quantization!r}, but not the ops that go with it; "
                f"let VLLM_PLUGINS include jetrl_patch"
            )

    def is_quantized(self, prefix: str) -> bool:
        """Whether the linear at ``prefix`` (vLLM's name) is FP8. Raises ModelError if its fused parts disagree."""
        names = hf_names(prefix, self.packed_modules_mapping)
        out = [name for name in names if not is_quantized(name, self.config.exclude)]
        if out and len(out) != len(names):
            inside = sorted(set(names) - set(out))
            raise ModelError(
                f"exclude={list(self.config.exclude)} takes {', '.join(out)} out of FP8 but not "
                f"{', '.join(inside)}, and vLLM holds them as one layer {prefix}; exclude all of them or none"
            )
        return not out


@register_weight_loader_v2_supported_method
class JetrlFp8LinearMethod(LinearMethodBase):
    """Loads and multiplies one FP8 linear."""

    dtype: ClassVar[torch.dtype] = FP8
    #: one scale per row of the weight, in place of one per 128-block
    channelwise: ClassVar[bool] = False

    def __init__(self, quant_config: JetrlFp8Config, prefix: str) -> None:
        self.quant_config = quant_config
        self.prefix = prefix
        self.names = hf_names(prefix, quant_config.packed_modules_mapping)
        self.scale_format = quant_config.config.scale_format
        self._backend: Backend | None = None

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
        """Registers ``weight`` FP8 [N, K] and ``weight_scale_inv`` FP32 [N, ceil(K/128)], N and K of this rank."""
        assert isinstance(layer, LinearBase)
        n, k = sum(output_partition_sizes), input_size_per_partition
        if k != input_size and k % BLOCK:
            self.quant_config.cut.append(self.prefix)
        load = extra["weight_loader"]
        layer.weight = ModelWeightParameter(
            data=torch.empty(n, k, dtype=FP8),
            input_dim=1,
            output_dim=0,
            weight_loader=self._weight_loader(layer, load),
        )
        layer.weight_scale_inv = ModelWeightParameter(
            data=torch.ones(n, -(-k // BLOCK), dtype=torch.float32),
            input_dim=1,
            output_dim=0,
            weight_loader=self._scale_loader(layer, load),
        )

    def shards(self, layer: LinearBase) -> list[Shard]:
        """The Hugging Face rectangles in this rank's parameters."""
        return shards_of(layer, self.names)

    def quantize(self, w_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A whole BF16 weight [N, K] -> bytes [N, K] and block scales [ceil(N/128), G], as the trainer makes them."""
        return self.backend(w_NK.device).quantize_weight(w_NK, self.scale_format)

    def backend(self, device: torch.device) -> Backend:
        """The GEMM backend, chosen once, by the same rule as in the trainer."""
        if self._backend is None:
            self._backend = get_backend(choose_backend(self.quant_config.config.backend, device.type))
        return self._backend

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """On a GPU, before anything is captured or served: a backend whose rows depend on the batch is refused.

        Raises:
            ModelError: what would be sampled is not what the FP8 trainer computes.
        """
        weight = layer.weight
        if self.quant_config.config.fp8_train:
            shape = (weight.shape[0], weight.shape[1])
            require_row_equality(self.backend(weight.device), shape, weight.device, self.scale_format)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``x [..., K]`` BF16 -> ``[..., N]`` BF16: one rounding, then the bias in BF16."""
        y = self._product(layer, x.reshape(-1, x.shape[-1]), torch.bfloat16).reshape(*x.shape[:-1], -1)
        return y if bias is None else y + bias

    def partial_sum(self, layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        """``x [M, K of this rank]`` BF16 -> the unrounded FP32 sum ``[M, N]`` that the ranks add up."""
        return self._product(layer, x, torch.float32)

    def _product(self, layer: torch.nn.Module, x_MK: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
        weight_NK, scale_NG = layer.weight.data, layer.weight_scale_inv.data
        return self.backend(x_MK.device).fprop(x_MK, weight_NK, scale_NG, self.scale_format, out_dtype)

    def _weight_loader(self, layer: LinearBase, load: Callable[..., None]) -> Callable[..., None]:
        def load_weight(param: torch.Tensor, loaded: torch.Tensor, *shard: Any, **kwargs: Any) -> None:
            self._check_split(layer)
            if loaded.dtype == self.dtype:
                load(param, loaded, *shard, **kwargs)
                return
            name = self._hf_name(layer, shard, kwargs)
            bf16_NK = loaded.to(torch.bfloat16)
            if not torch.isfinite(bf16_NK).all():
                raise SyncError(
                    f"{name}.weight has a NaN or an infinity, so it cannot be quantized; nothing may run on it"
                )
            q_NK, scales = self.quantize(bf16_NK.to(param.device))
            load(param, q_NK, *shard, **kwargs)
            scale = layer.weight_scale_inv
            scale.weight_loader(scale, scales, *shard, **kwargs)

        return load_weight

    def _scale_loader(self, layer: LinearBase, load: Callable[..., None]) -> Callable[..., None]:
        def load_scale(param: torch.Tensor, loaded: torch.Tensor, *shard: Any, **kwargs: Any) -> None:
            self._check_split(layer)
            rows = self._whole(layer, shard, kwargs)
            if loaded.shape[0] != rows:
                if loaded.shape[0] != -(-rows // BLOCK):
                    raise SyncError(
                        f"{self._hf_name(layer, shard, kwargs)}.weight_scale_inv: expected {-(-rows // BLOCK)} block "
                        f"rows (or {rows} rows), but got shape {list(loaded.shape)}"
                    )
                loaded = expand_weight_scale(loaded, rows)
            load(param, loaded, *shard, **kwargs)

        return load_scale

    def _find(self, layer: LinearBase, shard: tuple[Any, ...], kwargs: dict[str, Any]) -> Shard | None:
        wanted = shard[0] if shard else next(iter(kwargs.values()), None)
        return next((s for s in self.shards(layer) if s.shard_id == wanted), None)

    def _whole(self, layer: LinearBase, shard: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Rows of the whole weight that is being loaded; a weight that is fused on disk comes without a shard."""
        return (self._find(layer, shard, kwargs) or self.shards(layer)[0]).rows

    def _hf_name(self, layer: LinearBase, shard: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        found = self._find(layer, shard, kwargs)
        return found.name if found else self.prefix

    def _check_split(self, layer: LinearBase) -> None:
        # By the first load the whole model stands, so the list is complete.
        if self.quant_config.cut:
            raise cut_error(self.quant_config.cut, layer.tp_size)


def cut_error(layers: list[str], tp: int) -> ModelError:
    """The error for row-parallel layers whose share of K is not whole 128-blocks."""
    leaves = sorted({name.rsplit(".", 1)[-1] for name in layers})
    return ModelError(
        f"tensor_parallel_size={tp} cuts 128-wide blocks of {len(layers)} layers: {', '.join(layers)}. Each rank's "
        f"share of the contraction dimension must be a multiple of 128. Use a smaller tensor_parallel_size, or leave "
        f"these layers in BF16 on both sides with exclude={leaves} (JETRL_EXCLUDE={','.join(leaves)})"
    )


def quantized_modules(model: torch.nn.Module) -> list[tuple[LinearBase, JetrlFp8LinearMethod]]:
    """All FP8 linears of a built vLLM model, with their methods, in module order."""
    found = []
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, JetrlFp8LinearMethod) and isinstance(module, LinearBase):
            found.append((module, method))
    return found
