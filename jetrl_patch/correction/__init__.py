"""Measure and correct the mismatch between rollout and trainer, with pure functions of tensors."""
