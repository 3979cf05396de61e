"""On which devices which mode is to be had. Knows no vLLM, so that it can be asked before anything is imported."""

from __future__ import annotations

from jetrl_patch.errors import ConfigError

__all__ = ["refuse_exact_on"]


def refuse_exact_on(device_type: str) -> None:
    """Raise ConfigError for a kind of device on which this version has no attention that both sides share."""
    if device_type != "cpu":
        raise ConfigError(
            "align='exact' needs an attention kernel that trainer and rollout share, and this version has one for CPU "
            "only; use align='linear' on CUDA"
        )
