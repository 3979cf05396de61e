"""Which devices support exact mode. Imports no vLLM, so it can be called early."""

from __future__ import annotations

from jetrl_patch.errors import ConfigError, explain

__all__ = ["refuse_exact_on"]


def refuse_exact_on(device_type: str) -> None:
    """Raise ConfigError for a device without the ops that trainer and rollout share in exact mode.

    On CUDA this checks that they can run. ``jetrl_patch.exact.trial`` checks that they are exact before an engine serves.
    """
    from jetrl_patch.exact.capability import check_exact_cuda

    if device_type == "cpu":
        return
    ok, reason = check_exact_cuda() if device_type == "cuda" else (False, f"device type {device_type!r}")
    if not ok:
        raise ConfigError(
            explain(
                f"align='exact' on {device_type.upper()}",
                required="a CPU, or an NVIDIA GPU of compute capability 8.0 or newer with triton",
                found=reason,
                fix=f"use align='linear' on {device_type.upper()}",
            )
        )
