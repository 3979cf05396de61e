"""vLLM's norm, rotary embedding, activation and scaled logits, with Hugging Face's order of operations and rounding.

vLLM's table of out-of-tree ops replaces each class by name when it builds a model.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.linear_scaling_rope import LinearScalingRotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.llama3_rope import Llama3RotaryEmbedding

from jetrl_patch.errors import ModelError, explain
from jetrl_patch.exact import ops
from jetrl_patch.models.families import FAMILIES

__all__ = ["OPS", "ExactLogitsProcessor", "ExactRMSNorm", "ExactRotaryEmbedding", "ExactSiluAndMul"]


class ExactRMSNorm(RMSNorm):
    """Normalizes the sum of input and residual rounded to BF16, as Hugging Face does; vLLM normalizes the unrounded sum."""

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """``x [..., D]`` BF16, ``residual`` the same or None -> the norm, and the new residual if there was one."""
        if self.variance_size_override is not None or not self.has_weight:
            raise ModelError(
                "align='exact' does not support an RMSNorm over part of the width or without a weight. Use align='linear'."
            )
        if residual is None:
            return ops.rms_norm(x, self.weight.data, self.variance_epsilon)
        residual = residual + x
        return ops.rms_norm(residual, self.weight.data, self.variance_epsilon), residual


class ExactLogitsProcessor(LogitsProcessor):
    """Divides the logits, as the trainer's model does; vLLM multiplies them by the rounded reciprocal."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        hf_config = get_current_vllm_config().model_config.hf_text_config
        key = FAMILIES[hf_config.model_type].logits_divisor
        self.divisor = None if key is None else getattr(hf_config, key)
        if self.divisor is not None:
            self.scale = 1.0

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        """Logits ``[M, V]``, or None on a rank that does not sample."""
        logits: torch.Tensor | None = super().forward(*args, **kwargs)
        return logits if logits is None or self.divisor is None else logits / self.divisor


class ExactSiluAndMul(SiluAndMul):
    """``silu(gate) * up`` with the trainer's rounding."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x [..., 2D]`` BF16 -> ``[..., D]`` BF16."""
        gate, up = x.chunk(2, dim=-1)
        return ops.silu_mul(gate, up)


class ExactRotaryEmbedding(RotaryEmbedding):
    """Rounds the tables, products and sums to BF16, as Hugging Face's ``apply_rotary_pos_emb`` does."""

    def _compute_cos_sin_cache(self) -> torch.Tensor:
        """``[2, P, D/2]`` BF16: cosines, then sines, so that each table is contiguous."""
        model = get_current_vllm_config().model_config
        frequencies = ops.rope_frequencies(model.hf_text_config)
        width = 2 * frequencies.shape[0]
        if not self.is_neox_style or self.rotary_dim != width:
            raise ModelError(
                explain(
                    "align='exact' in vLLM",
                    required=f"the trainer's rotary embedding (rotary_dim={width}, neox=True)",
                    found=f"rotary_dim={self.rotary_dim}, neox={self.is_neox_style}",
                    fix="use align='linear'",
                )
            )
        positions = max(self.max_position_embeddings, model.max_model_len)
        return torch.stack(ops.rotary_table(frequencies, positions))

    def forward(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``positions [T]``, ``query`` and ``key [T, heads * D]`` BF16 -> both rotated, new tensors."""
        cos, sin = self._match_cos_sin_cache_dtype(query)
        positions = positions.flatten()

        def turn(x: torch.Tensor) -> torch.Tensor:
            heads_ThD = x.view(positions.shape[0], -1, self.head_size)
            return ops.apply_rotary(heads_ThD, cos, sin, positions).view(x.shape)

        return turn(query), None if key is None else turn(key)


class ExactLlama3RotaryEmbedding(ExactRotaryEmbedding, Llama3RotaryEmbedding):
    """Replaces vLLM's separate class for Llama 3 frequencies."""


class ExactLinearScalingRotaryEmbedding(ExactRotaryEmbedding, LinearScalingRotaryEmbedding):
    """Replaces vLLM's separate class for linearly scaled positions."""


OPS: dict[str, type] = {
    "LogitsProcessor": ExactLogitsProcessor,
    "RMSNorm": ExactRMSNorm,
    "SiluAndMul": ExactSiluAndMul,
    "RotaryEmbedding": ExactRotaryEmbedding,
    "Llama3RotaryEmbedding": ExactLlama3RotaryEmbedding,
    "LinearScalingRotaryEmbedding": ExactLinearScalingRotaryEmbedding,
}
