"""Gated delta nets of Hugging Face models in exact mode: the rollout's ops, over the sequences of padded or packed batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from jetrl_patch.errors import ModelError
from jetrl_patch.exact import ops
from jetrl_patch.exact.delta_net import delta_net
from jetrl_patch.exact.sequences import Sequences, batch_sequences


class ExactOnePlusNorm:
    """RMSNorm that multiplies by 1 + weight."""

    weight: Tensor
    eps: float

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps, one_plus=True)


class ExactGatedNorm:
    """RMSNorm, multiplied by SiLU(gate) rounded to BF16."""

    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        return ops.silu_mul(gate, ops.rms_norm(hidden_states, self.weight, self.variance_epsilon))


def pass_positions(block: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A hook before a block's forward: its delta net gets the positions too, to find the sequences of a packed row."""
    return args, {**kwargs, "jetrl_positions": kwargs.get("position_ids")}


class ExactDeltaNet:
    """A gated delta net whose sequences begin with empty states, wherever a packed row or padding puts them."""

    layer_idx: int
    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    conv1d: nn.Conv1d
    A_log: Tensor
    dt_bias: Tensor
    norm: nn.Module
    out_proj: nn.Module

    def forward(
        self,
        hidden_states: Tensor,
        cache_params: Any = None,
        attention_mask: Tensor | None = None,
        jetrl_positions: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """``hidden_states`` [B, T, hidden] -> the same shape; padding gets zeros. Raises ModelError for a cache with states.

        An empty one stays empty: at the next token the model's attention refuses it. verl's forward of a block passes no
        positions, but the boundaries of a packed row, ``cu_seqlens`` [R + 1].
        """
        if cache_params is not None and cache_params.has_previous_state(self.layer_idx):
            raise ModelError("align='exact' computes whole sequences, but got a cache of states. Pass use_cache=False.")
        B, T, _ = hidden_states.shape
        if cu_seqlens is not None:
            sequences = Sequences(None, cu_seqlens.to(torch.int32))
        else:
            sequences = batch_sequences(attention_mask, jetrl_positions, (B, T))
        x = hidden_states.flatten(0, 1)
        x = x if sequences.places is None else x[sequences.places]
        mixed, z, gates = self.project(x)
        if sequences.exceeded is not None:  # some boundaries may be missing; then every result must be NaN
            mixed = mixed.masked_fill(sequences.exceeded, float("nan"))
        sizes = (self.num_k_heads, self.num_v_heads, self.head_k_dim, self.head_v_dim)
        weights = (self.conv1d.weight.squeeze(1), self.A_log, self.dt_bias)
        core = delta_net(mixed, gates, weights, sequences.cu_seqlens, sizes)
        y = self.out_proj(self.norm(core, z.unflatten(1, (self.num_v_heads, -1))).flatten(1))
        if sequences.places is not None:
            y = y.new_zeros(B * T, y.shape[-1]).index_copy(0, sequences.places, y)
        return y.view(B, T, -1)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        """``x`` [T, hidden] -> the convolution's input [T, C], the norm's gate [T, H * V], and a and b [T, H]."""
        own: Any = self
        if hasattr(own, "in_proj_qkv"):
            return own.in_proj_qkv(x), own.in_proj_z(x), (own.in_proj_a(x), own.in_proj_b(x))
        q, k, v, z, b, a = own.fix_query_key_value_ordering(own.in_proj_qkvz(x)[None], own.in_proj_ba(x)[None])
        mixed = torch.cat([t[0].flatten(1) for t in (q, k, v)], -1)
        return mixed, z[0].flatten(1), (a[0], b[0])
