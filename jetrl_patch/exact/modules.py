"""Exact counterparts of the modules of a Hugging Face model, in the trainer and where vLLM runs its code: classes are swapped.

A swapped module keeps its parameters, its name and its place; ``isinstance`` with the original class holds.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jetrl_patch.exact import ops


class ExactNorm:
    """RMSNorm: one kernel with the rollout."""

    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        return ops.rms_norm(hidden_states, self.weight, self.variance_epsilon)


class ExactMLP:
    """Gated MLP: one SiLU-and-product with the rollout."""

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    def forward(self, x: Tensor) -> Any:
        return self.down_proj(ops.silu_mul(self.gate_proj(x), self.up_proj(x)))


class ExactRotary:
    """cos and sin from the table that the rollout uses too, grown when a longer position is met."""

    config: Any
    _jetrl_table: tuple[Tensor, Tensor] | None = None

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        needed = int(position_ids.max()) + 1
        if self._jetrl_table is None or self._jetrl_table[0].shape[0] < needed:
            size = max(needed, self.config.max_position_embeddings)
            self._jetrl_table = ops.rotary_table(ops.rope_frequencies(self.config), size)
        cos, sin = self._jetrl_table
        if cos.device != x.device:  # computed on the CPU on both sides, then kept where it is used
            self._jetrl_table = cos, sin = cos.to(x.device), sin.to(x.device)
        cos, sin = cos[position_ids], sin[position_ids]
        return torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)


class ExactEmbedding:
    """The residual stream starts in BF16, whatever dtype the master weights have."""

    weight: Tensor

    def forward(self, input: Tensor) -> Tensor:
        return F.embedding(input, self.weight).to(torch.bfloat16)


class ExactLinear:
    """A BF16 linear layer (``lm_head``, or one kept out of FP8) whose rows do not depend on their neighbours."""

    weight: Tensor
    bias: Tensor | None
    jetrl_splits: int = 1

    def forward(self, input: Tensor) -> Tensor:
        return ops.linear(input, self.weight, self.bias, self.jetrl_splits)


_made: dict[tuple[type, type], type] = {}


def swap(module: nn.Module, behaviour: type) -> None:
    """Give ``module`` the forward of ``behaviour``, in place; doing it twice changes nothing."""
    original = type(module)
    if issubclass(original, behaviour):
        return
    key = (behaviour, original)
    if key not in _made:
        _made[key] = type(f"{behaviour.__name__}_{original.__name__}", key, {"__module__": __name__})
    module.__class__ = _made[key]
