"""Attention of Hugging Face models in exact mode: the rollout's kernel, for padded and packed batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from jetrl_patch.errors import ModelError, explain
from jetrl_patch.exact.latent import rotated_pairs
from jetrl_patch.exact.ops import attention_varlen
from jetrl_patch.exact.sequences import batch_sequences

#: its name in transformers: ``attn_implementation="jetrl_exact"``
NAME = "jetrl_exact"


def keep_padding_mask(*args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
    """Implement transformers' mask interface: return the [B, T] padding mask unchanged. The kernel is causal by itself."""
    return attention_mask


def exact_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    fp8_cache: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: query [B, H, T, D], key [B, KH, T, D], value [B, KH, T, V] -> [B, T, H, V].

    With ``fp8_cache``, keys and values are rounded as in the rollout's FP8 KV cache. Padding gets zeros. Raises ModelError for a
    key/value cache, because only the rollout generates, for a mask of queries and keys, and for dropout.
    """
    B, H, T, D = query.shape
    if attention_mask is not None and attention_mask.dim() != 2:
        required, found = "a padding mask [B, T], because it is causal by itself", f"a mask {list(attention_mask.shape)}"
        raise ModelError(explain(NAME, required=required, found=found, fix="pass the padding mask, or none"))
    if key.shape[2] != T:
        raise ModelError(
            f"{NAME} computes whole sequences, but got {T} queries and {key.shape[2]} keys of a cache. Pass use_cache=False."
        )
    if dropout:
        raise ModelError(f"{NAME} has no dropout, but the model asks for {dropout:g}. Set attention_dropout=0.")
    sequences = batch_sequences(attention_mask, kwargs.get("position_ids"), (B, T))
    q, k, v = (t.transpose(1, 2).reshape(B * T, -1, t.shape[-1]) for t in (query, key, value))
    if sequences.places is not None:
        q, k, v = (t[sequences.places] for t in (q, k, v))
    if sequences.exceeded is not None:  # some boundaries may be missing; then every result must be NaN
        v = v.masked_fill(sequences.exceeded, float("nan"))
    out = attention_varlen(q, k, v, sequences.cu_seqlens, D**-0.5 if scaling is None else scaling, fp8_cache)
    if sequences.places is not None:
        out = out.new_zeros(B * T, *out.shape[1:]).index_copy(0, sequences.places, out)
    return out.view(B, T, H, -1), None


def round_embeddings(decoder: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A hook before the decoder's forward: embeddings that a caller has made are in BF16, as the rollout's are."""
    embeddings = kwargs.get("inputs_embeds")
    return args, kwargs if embeddings is None else {**kwargs, "inputs_embeds": embeddings.to(torch.bfloat16)}


# ---- Latent attention in exact mode (``exact.latent``) -------------------------------------------

class ExactLatentAttention:
    """transformers' latent attention in the absorbed form: one key/value head, and ``kv_b_proj`` in two halves."""

    config: Any
    layer_idx: int
    q_lora_rank: int | None
    q_proj: nn.Module
    q_a_proj: nn.Module
    q_a_layernorm: nn.Module
    q_b_proj: nn.Module
    kv_a_proj_with_mqa: nn.Module
    kv_a_layernorm: nn.Module
    kv_b_proj: nn.Module
    o_proj: nn.Module
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    qk_head_dim: int
    v_head_dim: int
    scaling: float

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """transformers' interface: hidden states [B, T, K], cosines and sines [B or 1, T, R] -> [B, T, K]."""
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        compressed = self.q_lora_rank is not None
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states))) if compressed else self.q_proj(hidden_states)
        q_BTHP, q_BTHR = q.unflatten(-1, (-1, self.qk_head_dim)).split([self.qk_nope_head_dim, self.qk_rope_head_dim], -1)
        c_BTL, k_BTR = self.kv_a_proj_with_mqa(hidden_states).split([self.kv_lora_rank, self.qk_rope_head_dim], -1)
        value = self.kv_a_layernorm(c_BTL).unsqueeze(1)
        cos, sin = (of.unsqueeze(1) for of in position_embeddings)
        query = torch.cat((self.kv_b_proj(q_BTHP).transpose(1, 2), rotated_pairs(q_BTHR.transpose(1, 2), cos, sin)), -1)
        key = torch.cat((value, rotated_pairs(k_BTR.unsqueeze(1), cos, sin)), -1)
        if past_key_values is not None:  # one with tokens is refused, as in every exact attention
            key, value = past_key_values.update(key, value, self.layer_idx)
        attention = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        a_BTHL, _ = attention(self, query, key, value, attention_mask, scaling=self.scaling, **kwargs)
        return self.o_proj(self.kv_b_proj(a_BTHL, self.v_head_dim).flatten(2)), None
