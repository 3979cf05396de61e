"""FP16 on both sides, the dtype of the rollout's KV cache, and the dtype of ``lm_head``."""
