"""Mismatch between rollout and trainer, as pure functions of tensors."""
