"""The quantizations of jetrl_patch in vLLM: one class, registered under the name of the run's format.

It decides which linears are quantized (``method.QuantizedLinearMethod``) and which stay in BF16, and refuses to serve in a
process that is not patched.
"""

from __future__ import annotations

import os
from collections import ChainMap
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, RowParallelLinear, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from jetrl_patch import runtime
from jetrl_patch.adapters.vllm.experts import QuantizedExpertsMethod
from jetrl_patch.adapters.vllm.filled import REGISTRIES
from jetrl_patch.adapters.vllm.head import ExactHeadMethod, ExactLinearMethod
from jetrl_patch.adapters.vllm.method import QuantizedLinearMethod
from jetrl_patch.adapters.vllm.names import hf_name
from jetrl_patch.adapters.vllm.shards import hf_names
from jetrl_patch.config import Config
from jetrl_patch.config.modes import QUANTIZATIONS
from jetrl_patch.errors import ConflictError, ModelError, NotPatchedError, explain
from jetrl_patch.fp8.layers import experts_quantized, is_cut, is_quantized

if TYPE_CHECKING:
    from vllm.model_executor.models.utils import WeightsMapper

__all__ = ["JetrlQuantConfig", "quantization_name"]


def quantization_name(config: Config) -> str:
    """Return vLLM's name for the quantization of a quantized mode."""
    assert config.format is not None
    return config.format.quantization


class JetrlQuantConfig(QuantizationConfig):
    """The plugin's settings inside vLLM. It travels pickled to every worker, whose own settings must be equal."""

    _packed: ChainMap[str, list[str]]

    def __init__(self) -> None:
        super().__init__()
        self.config = runtime.active_config()
        self.cut: list[str] = []
        #: of the whole model; models inside it have their own, for names that begin with theirs
        self.mapper: WeightsMapper | None = None

    @property
    def packed_modules_mapping(self) -> ChainMap[str, list[str]]:
        """The layers that vLLM merges -> their parts in a checkpoint.

        vLLM sets it for the whole model and then for each model inside it, whose classes may know other checkpoints; the first
        one counts. The dictionaries are the classes' own, which enter more as they build a model.
        """
        return self._packed

    @packed_modules_mapping.setter
    def packed_modules_mapping(self, found: dict[str, list[str]]) -> None:
        self._packed = ChainMap(*(*self._packed.maps, found) if hasattr(self, "_packed") else (found,))

    def get_name(self) -> str:
        return quantization_name(self.config)

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16]

    def get_min_capability(self) -> int:
        """Return the format's compute capability. vLLM calls it on an instance."""
        assert self.config.format is not None
        return self.config.format.capability

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> JetrlQuantConfig:
        return cls()

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> None:
        """Raise ConflictError if the checkpoint is quantized already and this quantization was requested."""
        if user_quant in QUANTIZATIONS:
            raise ConflictError(
                explain(
                    f"checkpoint for quantization={user_quant!r}",
                    required="BF16 weights",
                    found=f"quant_method={hf_quant_cfg.get('quant_method')!r} in its config.json",
                    fix="use the BF16 checkpoint",
                )
            )

    def apply_vllm_mapper(self, hf_to_vllm_mapper: WeightsMapper) -> None:
        """Keep the first map of names: vLLM builds the whole model before the models inside it."""
        self.mapper = self.mapper or hf_to_vllm_mapper

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Return the quantized method for block linears and experts; in exact mode the exact BF16 one for other layers."""
        self._require_patched()
        name = hf_name(prefix, self.mapper)
        if isinstance(layer, LinearBase):
            if self.is_quantized(name) and not (isinstance(layer, RowParallelLinear) and self._leaves_in_bf16(layer, name)):
                return QuantizedLinearMethod(self.config, name, self.packed_modules_mapping, self.cut)
            return ExactLinearMethod() if self.config.exact else UnquantizedLinearMethod()
        if isinstance(layer, VocabParallelEmbedding) and self.config.exact:
            return ExactHeadMethod(self.config.fp32_head)
        if isinstance(layer, RoutedExperts):
            quantized = experts_quantized(name, layer.moe_config.num_experts, self.config.exclude)
            return QuantizedExpertsMethod(self.config, layer, name, quantized)
        return None

    def _leaves_in_bf16(self, layer: RowParallelLinear, name: str) -> bool:
        """Whether ``on_cut`` takes this layer out of FP8, by the function that decides in the trainer."""
        if self.config.on_cut == "refuse" or self.config.channelwise:
            return False
        # vLLM asks for the method in the base class, after the row-parallel class has set its share of K
        found = is_cut(name, layer.input_size, layer.input_size // layer.input_size_per_partition)
        if found:
            runtime.register_cut([name])
        return found

    def _require_patched(self) -> None:
        """Raise if the plugin was not loaded here: this config arrives pickled even if ``VLLM_PLUGINS`` excludes it."""
        runtime.require_active("the vLLM worker", self.config)
        if not REGISTRIES.filled:
            raise NotPatchedError(
                f"this vLLM worker (pid {os.getpid()}) has quantization={self.get_name()!r} but not the ops for it; "
                f"include jetrl_patch in VLLM_PLUGINS"
            )

    def is_quantized(self, name: str) -> bool:
        """Whether the linear ``name`` is quantized, whose last part is vLLM's. Raises ModelError if its fused parts differ."""
        names = hf_names(name, self.packed_modules_mapping)
        out = [name for name in names if not is_quantized(name, self.config.exclude)]
        if out and len(out) != len(names):
            inside = sorted(set(names) - set(out))
            raise ModelError(
                f"exclude={list(self.config.exclude)} takes {', '.join(out)} out of FP8 but not "
                f"{', '.join(inside)}, but vLLM fuses them into one layer {name}. Exclude all of them or none."
            )
        return not out
