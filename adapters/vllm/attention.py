"""The rollout's attention in exact mode: the trainer's kernel over vLLM's paged cache, on a CPU and on CUDA."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadata, AttentionMetadataBuilder, AttentionType
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend, TritonAttentionImpl

from jetrl_patch import session
from jetrl_patch.adapters.vllm.compat import paged_keys_and_values
from jetrl_patch.errors import ModelError, explain
from jetrl_patch.exact import ops
from jetrl_patch.exact.kv_cache import VLLM_DTYPE, Pages, rounded
from jetrl_patch.patching.patch import constant

# ---- On every device -----------------------------------------------------------------------------

class ExactImpl:
    """Causal BF16 attention over whole contexts. It refuses, by name, every feature that would change the formula."""

    jetrl_exact = True
    scale: float
    num_kv_heads: int
    head_size: int
    #: values of ``kv_cache_dtype`` that this device's cache can have
    cache_dtypes: ClassVar[tuple[str, ...]] = ("auto", "bfloat16")
    #: further arguments of the constructor that vLLM's class takes
    own_arguments: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **unknown: Any,
    ) -> None:
        kind = AttentionType(attn_type).value
        own = {name: unknown.pop(name) for name in self.own_arguments if name in unknown}
        refused = {
            "ALiBi": alibi_slopes is not None,
            "a sliding window": sliding_window is not None,
            f"the KV cache {kv_cache_dtype}": kv_cache_dtype not in self.cache_dtypes,
            "capped attention logits": bool(logits_soft_cap),
            f"{kind} attention": kind != "decoder",
            "a KV cache shared between layers": kv_sharing_target_layer_name is not None,
            "attention sinks": sinks is not None,
            f"attention with {', '.join(unknown)}": bool(unknown),
        }
        found = [what for what, there in refused.items() if there]
        if found:
            raise ModelError(
                f"align='exact' does not support {', '.join(found)}: trainer and rollout would differ. Use align='linear'."
            )
        settings = (num_heads, head_size, scale, num_kv_heads, None, None, kv_cache_dtype, None, attn_type, None)
        super().__init__(*settings, **own)  # type: ignore[call-arg]  # the constructor of vLLM's class, the other base

    def pages(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """View vLLM's cache as keys and values, each ``[blocks, block size, KH, D]`` with any strides; if FP8, also scales."""
        raise NotImplementedError

    def fill_first_block(self, layer: Any, random: Callable[..., torch.Tensor]) -> None:
        """Write ``random(*shape)``, BF16 on the CPU, as keys and values to block 0 of a layer's cache, as a step does."""
        cache = layer.kv_cache
        size = self.pages(cache)[0].shape[1]
        k, v = (random(size, self.num_kv_heads, self.head_size).to(cache.device) for _ in range(2))
        self.do_kv_cache_update(layer, k, v, cache, torch.arange(size, device=cache.device))  # type: ignore[attr-defined]

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Fill ``output [T, H, D]`` in place from ``query [T, H, D]``, both BF16. Their last rows may be padding."""
        if attn_metadata is None:  # vLLM's memory profiling run
            return output.fill_(0)
        if output_scale is not None or output_block_scale is not None:
            raise ModelError(
                "align='exact' rounds attention to BF16 once, but vLLM requests a quantized output. Use align='linear'."
            )
        step, tokens = attn_metadata, attn_metadata.num_actual_tokens
        rows, scale = output[:tokens].view(tokens, *query.shape[1:]), self.scale
        keys, values, *scales = self.pages(kv_cache)
        where = (step.block_table, step.seq_lens, step.query_start_loc)
        ops.attention_paged(query[:tokens], keys, values, *where, scale, rows, tuple(scales) or None)
        return output


def _described(common: Any) -> dict[str, Any]:
    """The fields of a step's metadata that both devices have."""
    found = {name: getattr(common, name) for name in ("num_actual_tokens", "query_start_loc", "seq_lens", "slot_mapping")}
    return {**found, "block_table": common.block_table_tensor}


# ---- On a CPU ------------------------------------------------------------------------------------
# The backend keeps vLLM's name, scheduler and blocks, but inside a block it has its own layout: the ``KH * BS * 2D`` elements are
# ``[2, BS, KH, D]``, keys before values, which keeps the keys of a token contiguous. Nothing else reads inside a block, so prefix
# caching and chunked prefill work as in vLLM.

class ExactCPUAttentionBuilder(CPUAttentionMetadataBuilder):
    """Builds metadata without a work plan, which only vLLM's own kernel needs."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        # Skip the parent's constructor: it selects an instruction set for vLLM's kernel and limits the head sizes.
        super(CPUAttentionMetadataBuilder, self).__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> CPUAttentionMetadata:
        """Describe the step as vLLM does, without a work plan."""
        longest = {name: getattr(common_attn_metadata, name) for name in ("max_query_len", "max_seq_len")}
        return CPUAttentionMetadata(**_described(common_attn_metadata), **longest, scheduler_metadata=None, causal=True)


class ExactCPUAttentionImpl(ExactImpl, CPUAttentionBackendImpl):
    """The trainer's kernel over its own layout of vLLM's cache, which is BF16. An "FP8 cache" holds the rounded values."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fp8_cache = session.active_config().kv_cache == "fp8"

    def pages(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """View the cache, ``[blocks, KH, block size, 2D]`` to vLLM, in this backend's layout."""
        blocks, kv_heads, size, width = kv_cache.shape
        paged = kv_cache.view(blocks, 2, size, kv_heads, width // 2)
        return paged[:, 0], paged[:, 1]

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write ``key`` and ``value [T, KH, D]`` to the slots of their tokens; slot -1 is padding."""
        keys, values = self.pages(kv_cache)
        slots = slot_mapping.long()
        count = slots.shape[0]
        key, value = key[:count], value[:count]
        if bool((slots < 0).any()):
            real = slots >= 0
            slots, key, value = slots[real], key[real], value[real]
        if self.fp8_cache:
            key, value = rounded(key, value)
        block, row = slots // keys.shape[1], slots % keys.shape[1]
        keys[block, row] = key
        values[block, row] = value


class ExactCPUAttentionBackend(CPUAttentionBackend):
    """Replaces vLLM's ``CPU_ATTN`` under the same name."""

    get_supported_head_sizes = constant([])  # every size
    get_impl_cls = constant(ExactCPUAttentionImpl)
    get_builder_cls = constant(ExactCPUAttentionBuilder)


# ---- On CUDA -------------------------------------------------------------------------------------
# The kernel is the project's own, or FlashAttention-3 (``exact.trial``). Everything else is vLLM's Triton backend: the cache, its
# layouts, and the code that fills it. Metadata stays on the device and nothing is read back. Grids follow from shapes, so a CUDA
# graph can hold a decoding step.

@dataclass
class ExactCudaMetadata(AttentionMetadata):
    """A step of R requests and T tokens. Tensors are int32 on the device, except ``slot_mapping [T]``, int64."""

    num_actual_tokens: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor


class ExactCudaAttentionBuilder(AttentionMetadataBuilder[ExactCudaMetadata]):
    """Passes vLLM's common metadata on: no plan, no split, nothing that depends on the batch."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> ExactCudaMetadata:
        """Build the metadata. Raises ModelError for cascade or non-causal attention."""
        common = common_attn_metadata
        if common_prefix_len or common.causal is not True:
            required, fix = "causal attention over whole contexts", "use align='linear'"
            found = "a cascade" if common_prefix_len else "a mask that is not causal"
            raise ModelError(explain("align='exact' in vLLM", required=required, found=found, fix=fix))
        return ExactCudaMetadata(**_described(common))


class ExactCudaAttentionImpl(ExactImpl, TritonAttentionImpl):
    """Fills a BF16 cache like its parent, and reads it with the trainer's kernel. An FP8 cache has the project's layout."""

    cache_dtypes = ("auto", "bfloat16", VLLM_DTYPE)

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write ``key`` and ``value [T, KH, D]`` to the slots of their tokens; slot -1 is padding."""
        if self.kv_cache_dtype == VLLM_DTYPE:
            count = slot_mapping.shape[0]
            Pages.of(kv_cache, self.num_kv_heads, self.head_size).store(key[:count], value[:count], slot_mapping)
        else:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """Return False: the output is rounded to BF16 once."""
        return False

    def pages(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """View a BF16 cache in any layout of vLLM's Triton backend, an FP8 cache in the project's."""
        if self.kv_cache_dtype == VLLM_DTYPE:
            return Pages.of(kv_cache, self.num_kv_heads, self.head_size)
        return paged_keys_and_values(kv_cache, self.head_size)


class ExactCudaAttentionBackend(TritonAttentionBackend):
    """vLLM's ``CUSTOM`` backend. It accepts only what the exact kernel computes."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "bfloat16", VLLM_DTYPE]

    get_name = constant("CUSTOM")
    get_impl_cls = constant(ExactCudaAttentionImpl)
    get_builder_cls = constant(ExactCudaAttentionBuilder)
    supports_non_causal = supports_rswa = supports_sliding_window = supports_mm_prefix = constant(False)
    supports_sink = supports_alibi_sqrt = constant(False)

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        from jetrl_patch.kernels.attention import HEAD_DIMS

        return head_size in HEAD_DIMS

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return bool(attn_type == AttentionType.DECODER)

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        from jetrl_patch.backends.capability import LEAST

        return (capability.major, capability.minor) >= LEAST
