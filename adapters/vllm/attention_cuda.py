"""The rollout's attention in exact mode on CUDA: the trainer's kernel over vLLM's paged cache.

The kernel is the project's own, or FlashAttention-3 (``exact.trial``). The cache, its layouts and the code that fills it are
those of vLLM's own Triton backend; only the attention differs. The step's metadata stay on the device, and nothing is read back:
grids follow from shapes, so a CUDA graph can hold a decoding step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadata, AttentionMetadataBuilder, AttentionType
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend, TritonAttentionImpl

from jetrl_patch.adapters.vllm.attention import attend, refuse_attention
from jetrl_patch.adapters.vllm.compat import paged_keys_and_values
from jetrl_patch.errors import ModelError, explain

__all__ = ["ExactCudaAttentionBackend", "ExactCudaAttentionBuilder", "ExactCudaAttentionImpl", "ExactCudaMetadata"]


@dataclass
class ExactCudaMetadata(AttentionMetadata):
    """A step of R requests and T tokens. Tensors are int32 on the device, except ``slot_mapping [T]``, int64."""

    num_actual_tokens: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor


class ExactCudaAttentionBuilder(AttentionMetadataBuilder[ExactCudaMetadata]):
    """Passes on the common metadata: no plan, no split, nothing that depends on the batch."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> ExactCudaMetadata:
        """Build the metadata. Raises ModelError for cascade or non-causal attention."""
        common = common_attn_metadata
        if common_prefix_len or common.causal is not True:
            raise ModelError(
                explain(
                    "align='exact' in vLLM",
                    required="causal attention over whole contexts",
                    found="a cascade" if common_prefix_len else "a mask that is not causal",
                    fix="use align='linear'",
                )
            )
        return ExactCudaMetadata(
            num_actual_tokens=common.num_actual_tokens,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
        )


class ExactCudaAttentionImpl(TritonAttentionImpl):
    """Fills the cache as its parent does and reads it with the trainer's kernel."""

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
        attn_type: AttentionType = AttentionType.DECODER,
        kv_sharing_target_layer_name: Any = None,
        sinks: torch.Tensor | None = None,
        **unknown: Any,
    ) -> None:
        refuse_attention(
            alibi_slopes=alibi_slopes,
            sliding_window=sliding_window,
            kv_cache_dtype=kv_cache_dtype,
            logits_soft_cap=logits_soft_cap,
            attn_type=AttentionType(attn_type).value,
            kv_sharing_target_layer_name=kv_sharing_target_layer_name,
            sinks=sinks,
        )
        if unknown:
            raise ModelError(f"align='exact' does not support attention with {', '.join(unknown)}. Use align='linear'.")
        super().__init__(
            num_heads, head_size, scale, num_kv_heads, None, None, kv_cache_dtype, None, attn_type, None, None
        )

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """Return False: the output is rounded to BF16 once."""
        return False

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
        """``query [T, H, D]`` BF16, ``kv_cache`` in any layout of vLLM's Triton backend -> ``output``, in place."""
        if attn_metadata is None:  # vLLM's memory profiling run
            return output.fill_(0)
        if output_scale is not None or output_block_scale is not None:
            raise ModelError(
                "align='exact' rounds attention to BF16 once, but vLLM requests a quantized output. Use align='linear'."
            )
        keys, values = paged_keys_and_values(kv_cache, self.head_size)
        return attend(query, keys, values, attn_metadata, self.scale, output)


class ExactCudaAttentionBackend(TritonAttentionBackend):
    """Registered as vLLM's ``CUSTOM`` backend. Supports only what the exact kernel computes."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[ExactCudaAttentionImpl]:
        return ExactCudaAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[ExactCudaAttentionBuilder]:
        return ExactCudaAttentionBuilder

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

    @classmethod
    def _no(cls) -> bool:
        return False

    supports_non_causal = supports_rswa = supports_sliding_window = supports_mm_prefix = _no
    supports_sink = supports_alibi_sqrt = _no
