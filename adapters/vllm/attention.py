"""The rollout's attention in exact mode on a CPU, and what all devices share: one step over the paged cache, and refused
features."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from jetrl_patch.errors import ModelError
from jetrl_patch.exact import ops

__all__ = ["ExactCPUAttentionBackend", "ExactCPUAttentionBuilder", "ExactCPUAttentionImpl", "attend", "refuse_attention"]


# ---- Attention features that change the formula; the exact backends of all devices refuse them by name

def refuse_attention(
    *,
    alibi_slopes: Any,
    sliding_window: int | None,
    kv_cache_dtype: str,
    logits_soft_cap: float | None,
    attn_type: str,
    kv_sharing_target_layer_name: Any,
    sinks: Any,
) -> None:
    """Raise ModelError for anything but causal BF16 attention over whole contexts. Parameter names are vLLM's."""
    refused = {
        "ALiBi": alibi_slopes is not None,
        "a sliding window": sliding_window is not None,
        f"a quantized KV cache ({kv_cache_dtype})": kv_cache_dtype not in ("auto", "bfloat16"),
        "capped attention logits": bool(logits_soft_cap),
        f"{attn_type} attention": attn_type != "decoder",
        "a KV cache shared between layers": kv_sharing_target_layer_name is not None,
        "attention sinks": sinks is not None,
    }
    found = [what for what, there in refused.items() if there]
    if found:
        raise ModelError(
            f"align='exact' does not support {', '.join(found)}: trainer and rollout would differ. Use align='linear'."
        )


# ---- One step of exact attention over vLLM's paged cache, shared by the backends of all devices --

def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, step: Any, scale: float, output: torch.Tensor
) -> torch.Tensor:
    """Fill ``output [T, H, D]`` in place and return it.

    Args:
        query: ``[T, H, D]``; rows after ``step.num_actual_tokens`` are padding, as in ``output``.
        keys, values: the cache, each ``[blocks, block size, KH, D]`` with any strides.
        step: the backend's step metadata, with vLLM's field names.
    """
    tokens = step.num_actual_tokens
    rows = output[:tokens].view(tokens, *query.shape[1:])
    ops.attention_paged(
        query[:tokens], keys, values, step.block_table, step.seq_lens, step.query_start_loc, scale, rows
    )
    return output


# ---- The rollout's attention in exact mode on CPU: the trainer's kernel over vLLM's paged cache --
# The backend keeps vLLM's name, scheduler and blocks, but uses its own layout inside a block: the ``KH * BS * 2D``
# elements are ``[2, BS, KH, D]``, keys before values, so that a token's keys are contiguous. Nothing else looks inside a
# block, so prefix caching and chunked prefill work as in vLLM.

class ExactCPUAttentionBuilder(CPUAttentionMetadataBuilder):
    """Builds metadata without the work plan of vLLM's own kernel, which is not called."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        # Skip the parent's constructor: it selects an instruction set for its own kernel and limits the head sizes.
        super(CPUAttentionMetadataBuilder, self).__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> CPUAttentionMetadata:
        """Describe the step's shapes as vLLM does, without a scheduler plan."""
        common = common_attn_metadata
        return CPUAttentionMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            query_start_loc=common.query_start_loc,
            max_seq_len=common.max_seq_len,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            scheduler_metadata=None,
            causal=True,
        )


class ExactCPUAttentionImpl(CPUAttentionBackendImpl):
    """Causal attention over whole contexts. Refuses, by name, everything that would change the formula."""

    jetrl_exact = True

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
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        refuse_attention(
            alibi_slopes=alibi_slopes,
            sliding_window=sliding_window,
            kv_cache_dtype=kv_cache_dtype,
            logits_soft_cap=logits_soft_cap,
            attn_type=attn_type,
            kv_sharing_target_layer_name=kv_sharing_target_layer_name,
            sinks=sinks,
        )
        super().__init__(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
            sinks,
        )

    @staticmethod
    def pages(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """View vLLM's cache ``[NB, KH, BS, 2D]`` as keys and values, each ``[NB, BS, KH, D]``."""
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
        block, row = slots // keys.shape[1], slots % keys.shape[1]
        keys[block, row] = key
        values[block, row] = value

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Fill ``output [T, H, D]`` in place from ``query [T, H, D]``, both BF16."""
        if attn_metadata is None:
            return output
        keys, values = self.pages(kv_cache)
        return attend(query, keys, values, attn_metadata, self.scale, output)


class ExactCPUAttentionBackend(CPUAttentionBackend):
    """Replaces vLLM's ``CPU_ATTN`` under the same name."""

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Return an empty list: every size is supported."""
        return []

    @staticmethod
    def get_impl_cls() -> type[ExactCPUAttentionImpl]:
        return ExactCPUAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[ExactCPUAttentionBuilder]:
        return ExactCPUAttentionBuilder
