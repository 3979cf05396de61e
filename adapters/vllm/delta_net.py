"""Gated delta nets of the rollout in exact mode: the trainer's ops over vLLM's cache of states.

Only a worker may import this file: what it imports of vLLM asks the GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.v1.attention.backends.gdn_attn import GDNAttentionBackend, GDNAttentionMetadata, GDNAttentionMetadataBuilder

from jetrl_patch.adapters.vllm.fixes import unpacked
from jetrl_patch.exact.delta_net import delta_net_paged
from jetrl_patch.patching.patch import constant


class ExactDeltaNetBuilder(GDNAttentionMetadataBuilder):
    """Always says which requests have a state. vLLM leaves it out in a step of single tokens, and a prompt may have one token."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._has_state = torch.empty_like(self.spec_sequence_masks)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, *args: Any, **kwargs: Any) -> GDNAttentionMetadata:
        """Describe the step as vLLM does. What a CUDA graph reads of a step of single tokens is at one address."""
        found = super().build(common_prefix_len, common_attn_metadata, *args, **kwargs)
        has_state = common_attn_metadata.compute_num_computed_tokens() > 0
        if self.use_full_cuda_graph and not found.num_prefills and len(has_state) <= len(self._has_state):
            has_state = self._has_state[: len(has_state)].copy_(has_state)
        found.has_initial_state = has_state
        return found


class ExactDeltaNetBackend(GDNAttentionBackend):
    """vLLM's backend with this builder."""

    get_builder_cls = constant(ExactDeltaNetBuilder)


class ExactDeltaNet(QwenGatedDeltaNetAttention):
    """Computes a step token by token, from FP32 states (``engine``). vLLM copies only whole states, so caching works."""

    def get_attn_backend(self) -> type[ExactDeltaNetBackend]:
        return ExactDeltaNetBackend

    def forward(self, hidden_states: torch.Tensor, output: torch.Tensor | None = None) -> torch.Tensor:
        """``hidden_states [T, hidden]`` BF16 -> the same shape. Its last rows may be padding.

        vLLM before 0.26 gives the tensor to fill, ``output``.
        """
        mixed_qkvz, _ = self.in_proj_qkvz(hidden_states)
        ba, _ = self.in_proj_ba(hidden_states)
        if self.gqa_interleaved_layout:
            *qkv, z, b, a = self.fix_query_key_value_ordering(mixed_qkvz, ba)
            mixed = torch.cat([t.flatten(1) for t in qkv], -1)
        else:
            width = self.value_dim // self.tp_size
            mixed, z = mixed_qkvz.split([mixed_qkvz.shape[-1] - width, width], -1)
            b, a = ba.chunk(2, -1)
        z = z.unflatten(-1, (-1, self.head_v_dim)) if z.dim() == 2 else z
        core = torch.zeros_like(z)
        metadata: Any = get_forward_context().attn_metadata
        if metadata is not None:  # else vLLM's memory profiling run
            self._step(metadata[self.prefix], mixed, (a, b), core)
        found: torch.Tensor = self.out_proj(self.norm(core, z).flatten(1))[0]
        return found if output is None else output.copy_(found)

    def _step(
        self, step: GDNAttentionMetadata, mixed: torch.Tensor, gates: tuple[torch.Tensor, torch.Tensor], core: torch.Tensor
    ) -> None:
        requests = step.num_decodes + step.num_prefills
        starts, slots, has_state = step.non_spec_query_start_loc, step.non_spec_state_indices_tensor, step.has_initial_state
        assert starts is not None and slots is not None and has_state is not None
        tokens = step.num_decode_tokens + step.num_prefill_tokens
        weights = (unpacked(self.conv1d).flatten(1), self.A_log.data, self.dt_bias.data)
        sizes = (self.num_k_heads // self.tp_size, self.num_v_heads // self.tp_size, self.head_k_dim, self.head_v_dim)
        where = (slots[:requests], ~has_state[:requests])
        a, b = (gate[:tokens] for gate in gates)
        core[:tokens] = delta_net_paged(mixed[:tokens], (a, b), weights, starts[: requests + 1], sizes, self.kv_cache[:2], *where)
