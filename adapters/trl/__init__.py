"""TRL: ``GRPOTrainer`` and ``RLOOTrainer`` with vLLM in their process or a server."""
