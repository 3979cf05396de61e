"""What this adapter offers as ``jetrl_patch.services.Models``."""

from jetrl_patch.adapters.transformers.guard import to_bf16
from jetrl_patch.adapters.transformers.prepare import prepare_model
from jetrl_patch.adapters.transformers.score import score

__all__ = ["prepare_model", "score", "to_bf16"]
