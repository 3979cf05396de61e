"""vLLM: the rollout's FP8 linears, its exact ops, and its end of the weight sync."""
