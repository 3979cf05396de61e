"""Megatron-Core models that compute as the exact rollout does, by Megatron's own layer specs."""
