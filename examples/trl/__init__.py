"""Sums in words with TRL's ``GRPOTrainer``."""
