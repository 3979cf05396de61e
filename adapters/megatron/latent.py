"""Latent attention (MLA) in a Megatron-Core model, in the absorbed form of exact mode (``exact.latent``).

Parameters have the names of Megatron's TransformerEngine layers. Tensor-parallel ranks hold some heads. Each compresses its own
tokens, with whole matrices, and gets the latents of the others' tokens. Context-parallel ranks divide these heads among them, and
get the latents of all tokens, too.

Shape legend: T tokens, h heads of this rank, P width of a head without rotary part, R rotary part, L latent, V width of a value.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from jetrl_patch.adapters.megatron.exchange import HeadExchange
from jetrl_patch.adapters.megatron.layers import (
    Column,
    NormColumn,
    Row,
    Run,
    bound,
    boundaries,
    context_ranks,
    whole_matrix,
    whole_sequence,
)
from jetrl_patch.exact import ops
from jetrl_patch.exact.latent import into_latent, out_of_latent, rotated_pairs
from jetrl_patch.fp8.linear import Fp8State, fp8_linear


class Compression(nn.Module):
    """An FP8 layer that each tensor-parallel rank holds whole: its tokens [T, B, K] -> BF16 [T, B, N]."""

    counterpart: ClassVar[str] = "TELinear"
    parallel_mode: ClassVar[str] = "duplicated"  # Megatron-Bridge asks for it
    run: ClassVar[Run]

    def __init__(self, config: Any, width: int) -> None:
        super().__init__()
        self.weight = whole_matrix(config, width, config.hidden_size)
        self.fp8 = Fp8State(self.run.scale_format, self.run.backend)

    def forward(self, x: Tensor) -> Tensor:
        return fp8_linear(x, self.weight, None, self.fp8)


class Absorbed(NormColumn):
    """The norm of latents, and the BF16 weight [h (P + V), L] by whose halves queries and values are multiplied."""

    def norm(self, c: Tensor) -> Tensor:
        """Latents before the norm [..., L] -> BF16 [..., L]."""
        return ops.rms_norm(c, self.layer_norm_weight, self.eps)

    def forward(self, x: Tensor, values: int = 0, exchange: HeadExchange | None = None) -> Tensor:
        """``into_latent``, or ``out_of_latent`` to values of this width; with ``exchange`` of this rank's part of the heads."""
        weight = self.weight if exchange is None else exchange.own(self.weight)
        return out_of_latent(x, weight, values) if values else into_latent(x, weight)


class LatentAttention(MegatronModule):
    """In place of Megatron's ``MLASelfAttention``: this rank's tokens [t, 1, H] of a packed row -> BF16 [t, 1, H], no bias."""

    counterpart: ClassVar[str] = "MLASelfAttention"
    run: ClassVar[Run]

    def __init__(self, config: Any, *_: Any, pg_collection: Any, **__: Any) -> None:
        super().__init__(config)
        self.latent, self.rotary, self.value = config.kv_lora_rank, config.qk_pos_emb_head_dim, config.v_head_dim
        self.key = config.qk_head_dim + self.rotary
        heads, down, row = config.num_attention_heads, bound(Compression, self.run), bound(Row, self.run)
        self.group = context_ranks(config, pg_collection)
        common = {"config": config, "bias": False, "is_expert": False, "tp_group": pg_collection.tp}

        def column(kind: type, inputs: int, outputs: int) -> Any:
            return bound(kind, self.run)(inputs, outputs, init_method=config.init_method, gather_output=False, **common)

        if config.q_lora_rank is None:
            self.linear_q_proj = column(Column, config.hidden_size, heads * self.key)
        else:
            self.linear_q_down_proj = down(config, config.q_lora_rank)
            self.linear_q_up_proj = column(NormColumn, config.q_lora_rank, heads * self.key)
        self.linear_kv_down_proj = down(config, self.latent + self.rotary)
        self.linear_kv_up_proj = column(Absorbed, self.latent, heads * (config.qk_head_dim + self.value))
        self.linear_proj = row(
            heads * self.value, config.hidden_size, init_method=config.output_layer_init_method, input_is_parallel=True,
            skip_bias_add=True, **common,
        )  # fmt: skip

    def forward(
        self, hidden_states: Tensor, attention_mask: Any, *_: Any, packed_seq_params: Any, **__: Any
    ) -> tuple[Tensor, None]:
        up, L = self.linear_kv_up_proj, self.latent
        latent, rotary = self.linear_kv_down_proj(hidden_states).split((L, self.rotary), -1)
        keys = whole_sequence(up, torch.cat((up.norm(latent), rotary), -1))  # [T, 1, L + R]
        query = self._queries(hidden_states).view(len(keys), -1, self.key)  # [T, h, P + R]
        cu_seqlens = boundaries(packed_seq_params)
        cos, sin, exchange = self.run.positions.places(cu_seqlens, query, self.group)
        if exchange is not None:
            query, keys = exchange.to_heads(query), exchange.to_all(keys)
        plain, turned = query.split((self.key - self.rotary, self.rotary), -1)
        q = torch.cat((up(plain, exchange=exchange), rotated_pairs(turned, cos, sin)), -1)
        k = torch.cat((keys[..., :L], rotated_pairs(keys[..., L:], cos, sin)), -1)
        attended = ops.attention_varlen(q, k, k[..., :L], cu_seqlens, self.run.latent_scale, False)
        values = up(attended, self.value, exchange)
        if exchange is not None:
            values = exchange.to_tokens(values)
        out, _none = self.linear_proj(values.flatten(1).unsqueeze(1))
        return out, None

    def _queries(self, hidden_states: Tensor) -> Tensor:
        """[t, 1, H] -> [T, 1, h (P + R)]."""
        if self.config.q_lora_rank is None:
            found: Tensor = self.linear_q_proj(hidden_states)[0]
        else:
            found = self.linear_q_up_proj(self.linear_q_down_proj(hidden_states))[0]
        return found
