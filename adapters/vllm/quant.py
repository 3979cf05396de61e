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
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, RowParallelLinear, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.platforms import current_platform

from jetrl_patch import session
from jetrl_patch.adapters.vllm.compat import latent_backends
from jetrl_patch.adapters.vllm.experts import QuantizedExpertsMethod
from jetrl_patch.adapters.vllm.method import QuantizedLinearMethod
from jetrl_patch.adapters.vllm.ops import OPS, ExactHead, ExactHeadMethod, ExactLinearMethod
from jetrl_patch.adapters.vllm.ranks import ExactGateLinear, ExactReplicatedLinear, ExactRowParallelLinear
from jetrl_patch.adapters.vllm.shards import hf_name, hf_names, merged_already
from jetrl_patch.config import Config
from jetrl_patch.config.modes import QUANTIZATIONS
from jetrl_patch.errors import ConflictError, ModelError, NotPatchedError, explain
from jetrl_patch.exact.dispatch import configure
from jetrl_patch.models.layers import experts_quantized, is_cut, is_quantized
from jetrl_patch.models.structure import has_delta_nets
from jetrl_patch.patching.journal import Journal
from jetrl_patch.patching.patch import constant

if TYPE_CHECKING:
    from vllm.model_executor.models.utils import WeightsMapper


# ---- The quantization ----------------------------------------------------------------------------
# It decides which layers are quantized and which stay in BF16, and refuses to serve in a process that is not patched.

def quantization_name(config: Config) -> str:
    """Return vLLM's name for the quantization of a quantized mode."""
    assert config.format is not None
    return config.format.quantization


class JetrlQuantConfig(QuantizationConfig):
    """The plugin's settings inside vLLM. vLLM pickles it for every worker. The worker's own settings must be equal."""

    _packed: ChainMap[str, list[str]]
    get_supported_act_dtypes = constant([torch.bfloat16])
    get_config_filenames = constant([])

    def __init__(self) -> None:
        super().__init__()
        self.config = session.active_config()
        self.cut: list[str] = []
        self._merged: dict[str, list[str]] | None = None
        #: name map of the whole model; the maps of the models inside it are ignored
        self.mapper: WeightsMapper | None = None

    @property
    def packed_modules_mapping(self) -> ChainMap[str, list[str]]:
        """Layers that vLLM merges -> their parts in a checkpoint.

        vLLM sets it for the whole model and then for each model inside it, whose class may expect other checkpoints. The first
        one wins. The dictionaries are not copied, because a class adds entries while it builds a model.
        """
        return self._packed

    @packed_modules_mapping.setter
    def packed_modules_mapping(self, found: dict[str, list[str]]) -> None:
        self._packed = ChainMap(*(*self._packed.maps, found) if hasattr(self, "_packed") else (found,))

    def _parts(self) -> ChainMap[str, list[str]]:
        """``packed_modules_mapping``, without the layers that are merged in the checkpoint already."""
        engine = get_current_vllm_config_or_none()
        if self._merged is None and engine is not None:
            self._merged = merged_already(self._packed, engine.model_config.hf_config)
        return ChainMap(self._merged or {}, *self._packed.maps)

    def get_name(self) -> str:
        return quantization_name(self.config)

    def get_min_capability(self) -> int:
        """Return the compute capability that the format needs. vLLM calls it on an instance."""
        assert self.config.format is not None
        return self.config.format.capability

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> JetrlQuantConfig:
        return cls()

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None) -> None:
        """Raise ConflictError if the checkpoint is quantized already and this quantization was requested."""
        if user_quant in QUANTIZATIONS:
            what, method = f"checkpoint for quantization={user_quant!r}", hf_quant_cfg.get("quant_method")
            found = f"quant_method={method!r} in its config.json or hf_quant_config.json"
            raise ConflictError(explain(what, required="BF16 weights", found=found, fix="use the BF16 checkpoint"))

    def apply_vllm_mapper(self, hf_to_vllm_mapper: WeightsMapper) -> None:
        """Keep the first name map, that of the whole model: vLLM builds it before the models inside it."""
        self.mapper = self.mapper or hf_to_vllm_mapper

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Return the quantized method for block linears and experts, and in exact mode the exact BF16 method for other layers."""
        self._require_patched()
        name = hf_name(prefix, self.mapper)
        if isinstance(layer, LinearBase):
            if self.is_quantized(name) and not (isinstance(layer, RowParallelLinear) and self._leaves_in_bf16(layer, name)):
                return QuantizedLinearMethod(self.config, name, self._parts(), self.cut)
            return ExactLinearMethod() if self.config.exact else UnquantizedLinearMethod()
        if isinstance(layer, VocabParallelEmbedding) and self.config.exact:
            return ExactHeadMethod(self.config.fp32_head)
        if isinstance(layer, RoutedExperts):
            quantized = experts_quantized(name, layer.moe_config.num_experts, self.config.exclude)
            return QuantizedExpertsMethod(self.config, layer, name, quantized)
        return None

    def _leaves_in_bf16(self, layer: RowParallelLinear, name: str) -> bool:
        """Whether ``on_cut`` leaves this layer in BF16. The trainer uses the same rule."""
        if self.config.on_cut == "refuse" or self.config.channelwise:
            return False
        # RowParallelLinear sets input_size_per_partition before its base class calls get_quant_method
        ranks = layer.input_size // layer.input_size_per_partition
        found = is_cut(name, layer.input_size, ranks, self.config.scales)
        if found:
            session.register(cut=[name])
        return found

    def _require_patched(self) -> None:
        """Raise if the plugin was not loaded here. A pickled config arrives even if ``VLLM_PLUGINS`` excludes the plugin."""
        session.require_active("the vLLM worker", self.config)
        if self.get_name() not in quantization._CUSTOMIZED_METHOD_TO_QUANT_CONFIG:  # see ``fill``
            raise NotPatchedError(
                f"this vLLM worker (pid {os.getpid()}) has quantization={self.get_name()!r} but not the ops for it. "
                "Include jetrl_patch in VLLM_PLUGINS."
            )

    def is_quantized(self, name: str) -> bool:
        """Whether a linear is quantized. ``name`` ends in vLLM's name. Raises ModelError if its fused parts differ."""
        names = hf_names(name, self._parts())
        out = [name for name in names if not is_quantized(name, self.config.exclude)]
        if out and len(out) != len(names):
            inside = sorted(set(names) - set(out))
            raise ModelError(
                f"exclude={list(self.config.exclude)} takes {', '.join(out)} out of FP8 but not "
                f"{', '.join(inside)}, but vLLM fuses them into one layer {name}. Exclude all of them or none."
            )
        return not out


# ---- The entries in vLLM's registries ------------------------------------------------------------

#: turned off by exact mode on a GPU, unless the user has turned one on; ``engine`` then raises or decodes without graphs
_OFF = {
    "VLLM_USE_V2_MODEL_RUNNER": "the CUDA graphs of vLLM's V2 model runner, the default on CUDA, are not proven at load",
    "VLLM_USE_FLASHINFER_SAMPLER": "with FlashInfer's sampler, the default on CUDA, log-probs vary from about 44 sequences a "
    "batch on (https://github.com/vllm-project/vllm/issues/51187)",
}
#: seconds for an engine's first start: DeepGEMM compiles up to a hundred kernels with nvcc, a few seconds each
FIRST_START = 3600


def fill(config: Config, journal: Journal) -> None:
    """Register the quantization and, in exact mode, linears, ops and attention, all through the journal."""
    # vLLM's AMX kernels die with "Illegal instruction" unless the process already holds AMX tile permission.
    getattr(torch.cpu, "_init_amx", lambda: None)()
    if not config.quantized_rollout:
        return
    _quantization(quantization_name(config), journal)
    if not current_platform.is_cpu():
        _wait_for_kernels(journal)
    if config.exact:
        _exact(journal)


def prepare_worker(worker: Any, config: Config, journal: Journal) -> None:
    """Before a worker loads its model in exact mode: choose the ops, and register the delta net of a model that has some.

    Both ask the GPU. So ``fill`` does neither: it also runs in the process that builds the engine and in the engine's core, which
    vLLM keeps free of CUDA. There, ``engine`` checks what can run.

    Raises ConfigError as ``exact.dispatch.configure``, ConflictError if another plugin registered a delta net.
    """
    configure(config.backend, current_platform.device_type, config.scale_format)
    if has_delta_nets(worker.vllm_config.model_config.hf_config):
        from jetrl_patch.adapters.vllm.delta_net import ExactDeltaNet

        name, reason = "QwenGatedDeltaNetAttention", "the trainer's delta rule and its states"
        _claim(journal, custom_op.op_registry_oot, name, ExactDeltaNet, f"vllm out-of-tree op {name!r}", reason)


def _wait_for_kernels(journal: Journal) -> None:
    name = "VLLM_ENGINE_READY_TIMEOUT_S"
    if name not in os.environ:
        journal.set_attr(
            core_client, name, max(FIRST_START, core_client.VLLM_ENGINE_READY_TIMEOUT_S),
            target=f"vllm.v1.engine.core_client.{name}",
            reason="on its first start an engine compiles FP8 kernels for longer than vLLM waits for it",
            remove_when="vLLM's engine start-up timeout (VLLM_ENGINE_READY_TIMEOUT_S) restarts when the engine reports progress",
        )  # fmt: skip


def _claim(journal: Journal, registry: Any, key: Any, value: Any, target: str, reason: str) -> None:
    """Add an entry to a vLLM registry, unless it is there. Raises ConflictError if the key is taken."""
    held = registry.get(key)
    if held is value:
        return
    if held is not None:
        fix = "disable the plugin that registered it"
        raise ConflictError(explain(target, required="an entry that is free", found=repr(held), fix=fix))
    journal.set_item(registry, key, value, target=target, reason=reason)


def _quantization(name: str, journal: Journal) -> None:
    reason = "the quantized linears"
    # register_quantization_config() appends to lists and cannot be undone, so add the same entries by hand.
    for where, entries in (
        ("QUANTIZATION_METHODS", quantization.QUANTIZATION_METHODS),
        ("current_platform.supported_quantization", current_platform.supported_quantization),
    ):
        if entries and name not in entries:
            entries.append(name)
            journal.add_undo(functools.partial(entries.remove, name), target=f"vllm {where}", reason=reason)
    registry = quantization._CUSTOMIZED_METHOD_TO_QUANT_CONFIG
    _claim(journal, registry, name, JetrlQuantConfig, f"vllm quantization {name!r}", reason)


def _exact(journal: Journal) -> None:
    rounding = "the order and rounding of Hugging Face models"
    for name, (op, reason) in {
        **{name: (op, rounding) for name, op in OPS.items()},
        "RowParallelLinear": (ExactRowParallelLinear, "partial sums stay FP32 and are added in rank order"),
        "ParallelLMHead": (ExactHead, "heads that are built without a quantization"),
        "ReplicatedLinear": (ExactReplicatedLinear, "routers that are built without a quantization"),
        "GateLinear": (ExactGateLinear, "routers whose kernel depends on the GPU and the number of rows"),
    }.items():
        _claim(journal, custom_op.op_registry_oot, name, op, f"vllm out-of-tree op {name!r}", reason)
    # get_rope() caches modules, so a later engine would get an earlier engine's modules, with the original class.
    journal.set_attr(
        rotary_embedding, "_ROPE_DICT", {},
        target="vllm.model_executor.layers.rotary_embedding._ROPE_DICT",
        reason="engines built before and after enable() must not share this cache of modules",
    )  # fmt: skip
    backends = attention_registry.AttentionBackendEnum
    on_cpu = current_platform.is_cpu()
    ours = {backends.CUSTOM: "attention.ExactCudaAttentionBackend", backends.TRITON_MLA: "latent.ExactCudaLatentBackend"}
    if on_cpu:
        ours = {backends.CPU_ATTN: "attention.ExactCPUAttentionBackend"}
        ours |= dict.fromkeys(latent_backends(), "latent.ExactLatentBackend")
    if not on_cpu:
        for name, reason in _OFF.items():
            if name not in os.environ:
                journal.set_item(os.environ, name, "0", target=f"os.environ[{name!r}]", reason=reason)
    reason, overrides = "the trainer's attention over vLLM's paged cache", attention_registry._ATTN_OVERRIDES
    for place, backend in ours.items():
        path, target = f"jetrl_patch.adapters.vllm.{backend}", f"vllm attention backend {place.name!r}"
        _claim(journal, overrides, place, path, target, reason)
    # vLLM caches its choice of backend, so a later engine in this process would get that of an earlier one.
    journal.set_attr(
        selector, "_cached_get_attn_backend", functools.cache(inspect.unwrap(selector._cached_get_attn_backend)),
        target="vllm.v1.attention.selector._cached_get_attn_backend",
        reason="engines built before, between and after enable() and disable() must not share this cache of attention backends",
    )  # fmt: skip
