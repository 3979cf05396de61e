"""vLLM: the rollout's FP8 linears, its exact ops, and its side of the weight sync."""
