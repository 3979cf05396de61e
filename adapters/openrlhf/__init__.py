"""OpenRLHF 0.11: PPO and its relatives with Ray, DeepSpeed and vLLM."""
