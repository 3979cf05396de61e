"""TRL: ``GRPOTrainer`` with a colocated vLLM."""
