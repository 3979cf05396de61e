"""What this adapter offers as ``jetrl_patch.services.Models``."""

from jetrl_patch.adapters.transformers.guard import to_bf16
from jetrl_patch.adapters.transformers.prepare import prepare_model
from jetrl_patch.adapters.transformers.score import score
from jetrl_patch.adapters.transformers.sequence import share_sequences

__all__ = ["prepare_model", "score", "share_sequences", "to_bf16"]
