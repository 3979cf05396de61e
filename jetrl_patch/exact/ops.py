"""All exact ops in one namespace."""

from __future__ import annotations

from jetrl_patch.exact.attention import attention_paged, attention_varlen
from jetrl_patch.exact.elementwise import (
    apply_rotary,
    rms_norm,
    rope_frequencies,
    rope_magnitude,
    rotary_table,
    rotate_pair,
    silu_mul,
)
from jetrl_patch.exact.logprob import head_linear_fp32, linear, partial_sum, token_log_probs
from jetrl_patch.exact.route import Sigmoid, route

__all__ = [
    "Sigmoid", "apply_rotary", "attention_paged", "attention_varlen", "head_linear_fp32", "linear", "partial_sum", "rms_norm",
    "rope_frequencies", "rope_magnitude", "rotary_table", "rotate_pair", "route", "silu_mul",
    "token_log_probs",
]  # fmt: skip
