"""Dotted paths of verl's configuration."""

from __future__ import annotations

__all__ = ["ACTOR", "ENGINE", "MODEL", "REF", "ROLLOUT", "named"]

ACTOR = "actor_rollout_ref.actor"
REF = "actor_rollout_ref.ref"
MODEL = "actor_rollout_ref.model"
ROLLOUT = "actor_rollout_ref.rollout"
#: arguments that verl passes to vLLM's engine
ENGINE = f"{ROLLOUT}.engine_kwargs.vllm"


def named(path: str) -> str:
    """Name the setting at ``path`` in an error."""
    return f"verl setting {path}"
