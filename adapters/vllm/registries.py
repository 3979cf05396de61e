"""The plugin's entries in vLLM's registries. Importing this imports vLLM's layers."""

from __future__ import annotations

import functools
import inspect
import os

import torch
import vllm.model_executor.custom_op as custom_op
import vllm.model_executor.layers.quantization as quantization
import vllm.model_executor.layers.rotary_embedding as rotary_embedding
import vllm.v1.attention.backends.registry as attention_registry
import vllm.v1.attention.selector as selector
import vllm.v1.engine.core_client as core_client
from vllm.platforms import current_platform

from jetrl_patch.adapters.vllm.filled import claim
from jetrl_patch.adapters.vllm.linear import ExactReplicatedLinear, ExactRowParallelLinear
from jetrl_patch.adapters.vllm.quant import JetrlQuantConfig, quantization_name
from jetrl_patch.config import Config
from jetrl_patch.exact.dispatch import configure
from jetrl_patch.patching.journal import Journal

__all__ = ["fill"]

#: what exact mode turns off on a GPU; ``engine`` refuses it where the user has turned it on
_OFF = {
    "VLLM_USE_V2_MODEL_RUNNER": "the log-softmax of vLLM's V2 model runner, the default on CUDA, differs from the trainer's",
    "VLLM_USE_FLASHINFER_SAMPLER": "with FlashInfer's sampler, the default on CUDA, log-probs vary from about 44 sequences a "
    "batch on (https://github.com/vllm-project/vllm/issues/51187)",
}
#: seconds that an engine may take to its first start. DeepGEMM compiles up to a hundred kernels with nvcc, some seconds each
FIRST_START = 3600


def fill(config: Config, journal: Journal) -> None:
    """Register, through the journal, the quantization and, in exact mode, the row-parallel linear, ops and attention."""
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
            reason="at its first start an engine compiles FP8 kernels before it serves, for longer than vLLM waits",
            remove_when="vLLM waits for an engine as long as it reports progress",
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
        else (backends.CUSTOM, "attention_cuda.ExactCudaAttentionBackend")
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
    # vLLM remembers which backend it chose, and would build another engine of this process with the one of an earlier engine.
    journal.set_attr(
        selector,
        "_cached_get_attn_backend",
        functools.cache(inspect.unwrap(selector._cached_get_attn_backend)),
        target="vllm.v1.attention.selector._cached_get_attn_backend",
        reason="engines built before, between and after enable() and disable() must not share this cache of attention backends",
    )
