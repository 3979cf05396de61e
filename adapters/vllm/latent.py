"""The rollout's latent attention in exact mode: the trainer's absorbed form (``exact.latent``) over vLLM's cache.

vLLM's layer expands keys and values in a prefill, and multiplies by the halves of ``kv_b_proj`` in decoding. It asks the metadata
which tokens are which. Here all of them are a prefill's, whose method gets queries as they are, so one method computes them all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.attention.mla_attention import MLACommonBackend, MLACommonImpl
from vllm.v1.attention.backend import MultipleOf

from jetrl_patch.adapters.vllm.attention import ExactCudaAttentionBuilder, ExactCudaMetadata, ExactImpl
from jetrl_patch.exact import latent, ops
from jetrl_patch.patching.patch import constant


@dataclass
class ExactLatentMetadata(ExactCudaMetadata):
    """A step whose tokens are all a prefill's to vLLM's layer."""

    num_prefills: int = 0
    num_decodes: int = 0
    num_decode_tokens: int = 0


class ExactLatentBuilder(ExactCudaAttentionBuilder):
    """Passes vLLM's common metadata on, as on CUDA."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> ExactLatentMetadata:
        """Build the metadata. Raises ModelError for cascade or non-causal attention."""
        step = super().build(common_prefix_len, common_attn_metadata, fast_build)
        return ExactLatentMetadata(**vars(step), num_prefills=step.seq_lens.shape[0])


class ExactLatentImpl(ExactImpl, MLACommonImpl[ExactLatentMetadata]):
    """The trainer's kernel over vLLM's cache ``[blocks, block size, L + R]``: of each token the latent and the rotated key."""

    own_arguments = (
        "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim", "v_head_dim", "kv_b_proj",
        "indexer",
    )  # fmt: skip

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
        skip_scale: bool = False,
    ) -> None:
        """Write ``kv_c_normed [T, L]`` and ``k_pe [T, 1, R]`` to the slots of their tokens; slot -1 is padding."""
        if kv_cache.numel():
            slots = slot_mapping.flatten().long()
            real = (slots >= 0).nonzero().squeeze(1)
            rows = torch.cat((kv_c_normed, k_pe.flatten(1)), -1)[real]
            kv_cache.view(-1, rows.shape[-1])[slots[real]] = rows

    def fill_first_block(self, layer: Any, random: Callable[..., torch.Tensor]) -> None:
        """As ``ExactImpl.fill_first_block``, with latents and rotated keys, which the cache holds as they are."""
        block = layer.kv_cache[0]
        block.copy_(random(*block.shape))

    def forward_mqa(self, *args: Any, **kwargs: Any) -> Any:
        """Raise NotImplementedError: the metadata gives no token to vLLM's decoding."""
        raise NotImplementedError

    def forward_mha(
        self,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: ExactLatentMetadata,
        k_scale: torch.Tensor,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
    ) -> None:
        """Fill ``output [T, H * V]`` from queries ``q [T, H, P + R]``, both BF16. The cache holds the new tokens already."""
        step, weight = attn_metadata, self.kv_b_proj.weight.data
        q_THP, q_THR = q.split([self.qk_nope_head_dim, self.qk_rope_head_dim], -1)
        query = torch.cat((latent.into_latent(q_THP, weight), q_THR), -1)
        keys = kv_c_and_k_pe_cache.unsqueeze(2)
        where = (step.block_table, step.seq_lens, step.query_start_loc)
        a_THL = ops.attention_paged(query, keys, keys[..., : self.kv_lora_rank], *where, self.scale)
        output.copy_(latent.out_of_latent(a_THL, weight, self.v_head_dim).flatten(1))


class ExactLatentBackend(MLACommonBackend):
    """Replaces vLLM's ``CPU_MLA`` and ``AMX_MLA``."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]

    get_name = constant("CPU_MLA")
    get_impl_cls = constant(ExactLatentImpl)
    get_builder_cls = constant(ExactLatentBuilder)
    get_supported_head_sizes = constant([])  # every size
    get_supported_kernel_block_sizes = constant([MultipleOf(1)])  # a block of any size, too
    supports_block_size = constant(True)


class ExactCudaLatentImpl(ExactLatentImpl):
    """The same on a GPU, where vLLM's kernel fills the cache: it copies BF16, and the host does not wait for it."""

    def do_kv_cache_update(self, *args: Any, **kwargs: Any) -> None:
        """Write latents and rotated keys to the slots of their tokens."""
        MLACommonImpl.do_kv_cache_update(self, *args, **kwargs)


class ExactCudaLatentBackend(ExactLatentBackend):
    """Replaces vLLM's ``TRITON_MLA``. Blocks of 16 or more keys, as vLLM makes them, are read as they are."""

    get_name = constant("TRITON_MLA")
    get_impl_cls = constant(ExactCudaLatentImpl)
