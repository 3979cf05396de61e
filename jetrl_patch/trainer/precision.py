"""What training in this process needs because of its precision. Imports no torch: a process that only has settings reads it."""

from __future__ import annotations

from jetrl_patch import active

__all__ = ["scales_loss"]


def scales_loss() -> bool:
    """Whether this process trains with a loss scale."""
    return active.active_with(lambda config: config.mode.scales_loss)
