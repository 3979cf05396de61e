"""The plugin's quantization in vLLM, registered under the name of the run's format, and its other registry entries."""

from __future__ import annotations

import functools
import inspect
import os
from collections import ChainMap
from typing import TYPE_CHECKING, Any

import torch
import vllm.model_executor.custom_op as custom_op
import vllm.model_executor.layers.quantization as quantization
import vllm.model_executor.layers.rotary_embedding as rotary_embedding
import vllm.v1.attention.backends.registry as attention_registry
import vllm.v1.attention.selector as selector
import vllm.v1.engine.core_client as core_client
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, RowParallelLinear, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.platforms import current_platform

from jetrl_patch import session
from jetrl_patch.adapters.vllm.experts import QuantizedExpertsMethod
from jetrl_patch.adapters.vllm.method import QuantizedLinearMethod
from jetrl_patch.adapters.vllm.ops import ExactHeadMethod, ExactLinearMethod
from jetrl_patch.adapters.vllm.ranks import ExactReplicatedLinear, ExactRowParallelLinear
from jetrl_patch.adapters.vllm.shards import REGISTRIES, claim, hf_name, hf_names
from jetrl_patch.config import Config
from jetrl_patch.config.modes import QUANTIZATIONS
from jetrl_patch.errors import ConflictError, ModelError, NotPatchedError, explain
from jetrl_patch.exact.dispatch import configure
from jetrl_patch.models.layers import experts_quantized, is_cut, is_quantized
from jetrl_patch.patching.journal import Journal

if TYPE_CHECKING:
    from vllm.model_executor.models.utils import WeightsMapper

__all__ = ["JetrlQuantConfig", "fill", "quantization_name"]


# ---- The quantization ----------------------------------------------------------------------------
# It decides which layers are quantized and which stay in BF16, and refuses to serve in a process that is not patched.

def quantization_name(config: Config) -> str:
    """Return vLLM's name for the quantization of a quantized mode."""
    assert config.format is not None
    return config.format.quantization


class JetrlQuantConfig(QuantizationConfig):
    """The plugin's settings inside vLLM. vLLM pickles it for every worker, whose own settings must be equal."""

    _packed: ChainMap[str, list[str]]

    def __init__(self) -> None:
        super().__init__()
        self.config = session.active_config()
        self.cut: list[str] = []
        #: name map of the whole model; models inside it have maps of their own, which are ignored
        self.mapper: WeightsMapper | None = None

    @property
    def packed_modules_mapping(self) -> ChainMap[str, list[str]]:
        """Layers that vLLM merges -> their parts in a checkpoint.

        vLLM sets it for the whole model and then for each model inside it, whose class may be made for other checkpoints. The
        first one wins. The dictionaries are the classes' own, because a class adds entries while it builds a model.
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
        """Return the compute capability that the format needs. vLLM calls it on an instance."""
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
        """Keep the first name map, that of the whole model: vLLM builds it before the models inside it."""
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
        """Whether ``on_cut`` leaves this layer in BF16. The trainer decides by the same function."""
        if self.config.on_cut == "refuse" or self.config.channelwise:
            return False
        # the row-parallel class sets its share of K before the base class asks for the method
        found = is_cut(name, layer.input_size, layer.input_size // layer.input_size_per_partition)
        if found:
            session.register_cut([name])
        return found

    def _require_patched(self) -> None:
        """Raise if the plugin was not loaded here. A pickled config arrives even if ``VLLM_PLUGINS`` excludes the plugin."""
        session.require_active("the vLLM worker", self.config)
        if not REGISTRIES.filled:
            raise NotPatchedError(
                f"this vLLM worker (pid {os.getpid()}) has quantization={self.get_name()!r} but not the ops for it; "
                f"include jetrl_patch in VLLM_PLUGINS"
            )

    def is_quantized(self, name: str) -> bool:
        """Whether the linear is quantized. ``name`` ends in vLLM's own name. Raises ModelError if its fused parts differ."""
        names = hf_names(name, self.packed_modules_mapping)
        out = [name for name in names if not is_quantized(name, self.config.exclude)]
        if out and len(out) != len(names):
            inside = sorted(set(names) - set(out))
            raise ModelError(
                f"exclude={list(self.config.exclude)} takes {', '.join(out)} out of FP8 but not "
                f"{', '.join(inside)}, but vLLM fuses them into one layer {name}. Exclude all of them or none."
            )
        return not out


# ---- The entries in vLLM's registries ------------------------------------------------------------

#: turned off by exact mode on a GPU; ``engine`` raises if the user has turned one on
_OFF = {
    "VLLM_USE_V2_MODEL_RUNNER": "the log-softmax of vLLM's V2 model runner, the default on CUDA, differs from the trainer's",
    "VLLM_USE_FLASHINFER_SAMPLER": "with FlashInfer's sampler, the default on CUDA, log-probs vary from about 44 sequences a "
    "batch on (https://github.com/vllm-project/vllm/issues/51187)",
}
#: seconds for an engine's first start: DeepGEMM compiles up to a hundred kernels with nvcc, a few seconds each
FIRST_START = 3600


def fill(config: Config, journal: Journal) -> None:
    """Register the quantization and, in exact mode, linears, ops and attention. All of it through the journal."""
    # vLLM's AMX kernels die with "Illegal instruction" unless the process already holds AMX tile permission.
    getattr(torch.cpu, "_init_amx", lambda: None)()
    if not config.quantized_rollout:
        return
    _quantization(quantization_name(config), journal)
    if not current_platform.is_cpu():
        _wait_for_kernels(journal)
    if config.exact:
        configure(config.backend, current_platform.device_type)
        _exact(journal)


def _wait_for_kernels(journal: Journal) -> None:
    name = "VLLM_ENGINE_READY_TIMEOUT_S"
    if name not in os.environ:
        journal.set_attr(
            core_client,
            name,
            max(FIRST_START, core_client.VLLM_ENGINE_READY_TIMEOUT_S),
            target=f"vllm.v1.engine.core_client.{name}",
            reason="on its first start an engine compiles FP8 kernels for longer than vLLM waits for it",
            remove_when="vLLM's engine start-up timeout (VLLM_ENGINE_READY_TIMEOUT_S) restarts whenever the engine reports "
            "progress",
        )


def _quantization(name: str, journal: Journal) -> None:
    # register_quantization_config() appends to lists and cannot be undone, so add the same entries by hand.
    lists = [("QUANTIZATION_METHODS", quantization.QUANTIZATION_METHODS)]
    if current_platform.supported_quantization:
        lists.append(("current_platform.supported_quantization", current_platform.supported_quantization))
    for where, entries in lists:
        if name not in entries:
            entries.append(name)
            undo = functools.partial(entries.remove, name)
            journal.add_undo(undo, target=f"vllm {where}", reason="the quantized linears")
    claim(
        journal,
        quantization._CUSTOMIZED_METHOD_TO_QUANT_CONFIG,
        name,
        JetrlQuantConfig,
        target=f"vllm quantization {name!r}",
        reason="the quantized linears",
    )


def _op(journal: Journal, name: str, replacement: type, reason: str) -> None:
    claim(journal, custom_op.op_registry_oot, name, replacement, target=f"vllm out-of-tree op {name!r}", reason=reason)


def _exact(journal: Journal) -> None:
    from jetrl_patch.adapters.vllm.ops import OPS

    for name, replacement in OPS.items():
        _op(journal, name, replacement, "the order and rounding of Hugging Face models")
    _op(journal, "RowParallelLinear", ExactRowParallelLinear, "partial sums stay FP32 and are added in rank order")
    _op(journal, "ReplicatedLinear", ExactReplicatedLinear, "routers that are built without a quantization")
    # get_rope() caches modules; those of an earlier engine would come back with the original class.
    journal.set_attr(
        rotary_embedding,
        "_ROPE_DICT",
        {},
        target="vllm.model_executor.layers.rotary_embedding._ROPE_DICT",
        reason="engines built before and after enable() must not share this cache of modules",
    )
    backends = attention_registry.AttentionBackendEnum
    on_cpu = current_platform.is_cpu()
    place, ours = (
        (backends.CPU_ATTN, "attention.ExactCPUAttentionBackend")
        if on_cpu
        else (backends.CUSTOM, "attention.ExactCudaAttentionBackend")
    )
    if not on_cpu:
        for name, reason in _OFF.items():
            if name not in os.environ:
                journal.set_item(os.environ, name, "0", target=f"os.environ[{name!r}]", reason=reason)
    claim(
        journal,
        attention_registry._ATTN_OVERRIDES,
        place,
        f"jetrl_patch.adapters.vllm.{ours}",
        target=f"vllm attention backend {place.name!r}",
        reason="the trainer's attention over vLLM's paged cache",
    )
    # vLLM caches its choice of backend. A later engine in this process would get an earlier engine's.
    journal.set_attr(
        selector,
        "_cached_get_attn_backend",
        functools.cache(inspect.unwrap(selector._cached_get_attn_backend)),
        target="vllm.v1.attention.selector._cached_get_attn_backend",
        reason="engines built before, between and after enable() and disable() must not share this cache of attention backends",
    )
