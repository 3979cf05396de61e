"""OpenRLHF 0.11: PPO and related algorithms with Ray, DeepSpeed and vLLM."""
