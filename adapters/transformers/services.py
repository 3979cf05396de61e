"""What this adapter offers as ``jetrl_patch.registry.Models``."""

from jetrl_patch.adapters.transformers.attention import share_sequences
from jetrl_patch.adapters.transformers.explain import explain
from jetrl_patch.adapters.transformers.prepare import prepare_model, to_bf16
from jetrl_patch.adapters.transformers.score import score

__all__ = ["explain", "prepare_model", "score", "share_sequences", "to_bf16"]
