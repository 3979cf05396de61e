"""Metrics of a batch whose tokens a correction drops entirely: all weights and the effective sample size are 0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["compute_is_metrics"]

_ZERO = ("mean", "std", "eff_sample_size", "seq_mean", "seq_std", "seq_max", "seq_min")


def compute_is_metrics(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap verl's ``compute_is_metrics``, which divides by the sum of the squared weights."""

    def compute_is_metrics(rollout_is_weights: Any, *args: Any, **kwargs: Any) -> dict[str, float]:
        if bool(rollout_is_weights.any()):
            return original(rollout_is_weights, *args, **kwargs)
        # the metrics that do not depend on the weights
        found: dict[str, float] = original(rollout_is_weights + 1.0, *args, **kwargs)
        zero = [f"rollout_is_{name}" for name in _ZERO]
        if kwargs.get("rollout_is") == "token":  # otherwise these describe the plain ratios
            zero += ["rollout_is_max", "rollout_is_min"]
        return {**found, **dict.fromkeys(zero, 0.0), "rollout_is_seq_max_deviation": 1.0}

    return compute_is_metrics
