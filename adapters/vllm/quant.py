"""Our quantizations as vLLM knows them: one class for all, registered under the name of the run's format.

It says which linears are quantized (``method.QuantizedLinearMethod``), which stay in BF16, and refuses to serve in a process
that was not patched.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from jetrl_patch import runtime
from jetrl_patch.adapters.vllm.filled import REGISTRIES
from jetrl_patch.adapters.vllm.head import ExactHeadMethod, ExactLinearMethod
from jetrl_patch.adapters.vllm.method import QuantizedLinearMethod
from jetrl_patch.adapters.vllm.shards import hf_names
from jetrl_patch.config import Config
from jetrl_patch.config.modes import QUANTIZATIONS
from jetrl_patch.errors import ConflictError, ModelError, NotPatchedError
from jetrl_patch.fp8.layers import is_quantized

__all__ = ["JetrlQuantConfig", "quantization_name"]


def quantization_name(config: Config) -> str:
    """What vLLM calls our quantization in this mode, which has one."""
    assert config.format is not None
    return config.format.quantization


class JetrlQuantConfig(QuantizationConfig):
    """vLLM's handle on our settings. It travels pickled to every worker; the worker's own settings must equal it."""

    def __init__(self) -> None:
        super().__init__()
        self.config = runtime.active_config()
        self.cut: list[str] = []

    def get_name(self) -> str:
        return quantization_name(self.config)

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16]

    def get_min_capability(self) -> int:
        """Of the format; vLLM asks an instance, though its own classes answer for all of theirs."""
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
        """Called when the checkpoint names a quantization of its own. Raises ConflictError if ours was asked for."""
        if user_quant in QUANTIZATIONS:
            raise ConflictError(
                f"quantization: required {user_quant!r}, but the checkpoint's config.json says "
                f"quant_method={hf_quant_cfg.get('quant_method')!r}; use the BF16 checkpoint"
            )

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Ours for the linears of the blocks, exact BF16 for the head and for what ``exclude`` names."""
        self._require_patched()
        if isinstance(layer, LinearBase):
            if self.is_quantized(prefix):
                return QuantizedLinearMethod(self, prefix)
            return ExactLinearMethod() if self.config.exact else UnquantizedLinearMethod()
        if isinstance(layer, VocabParallelEmbedding) and self.config.exact:
            return ExactHeadMethod(self.config.fp32_head)
        return None

    def _require_patched(self) -> None:
        """This config may arrive, pickled, in a process that loaded no plugin (``VLLM_PLUGINS`` can do that)."""
        runtime.require_active("the vLLM worker", self.config)
        if not REGISTRIES.filled:
            raise NotPatchedError(
                f"this vLLM worker (pid {os.getpid()}) got quantization={self.get_name()!r}, but not the ops that go with it; "
                f"let VLLM_PLUGINS include jetrl_patch"
            )

    def is_quantized(self, prefix: str) -> bool:
        """Whether the linear at ``prefix`` (vLLM's name) is quantized. Raises ModelError if its fused parts disagree."""
        names = hf_names(prefix, self.packed_modules_mapping)
        out = [name for name in names if not is_quantized(name, self.config.exclude)]
        if out and len(out) != len(names):
            inside = sorted(set(names) - set(out))
            raise ModelError(
                f"exclude={list(self.config.exclude)} takes {', '.join(out)} out of FP8 but not "
                f"{', '.join(inside)}, and vLLM holds them as one layer {prefix}; exclude all of them or none"
            )
        return not out
