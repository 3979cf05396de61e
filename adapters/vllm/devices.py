"""On which devices which mode is to be had. Knows no vLLM, so that it can be asked before anything is imported."""

from __future__ import annotations

from jetrl_patch.errors import ConfigError, explain

__all__ = ["refuse_exact_on"]


def refuse_exact_on(device_type: str) -> None:
    """Raise ConfigError for a device without the ops that trainer and rollout share in exact mode.

    On CUDA this says whether they can run; whether they keep their promise there is tried before an engine serves
    (``jetrl_patch.exact.trial``).
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
