"""Where things stand in verl's configuration, as dotted paths."""

from __future__ import annotations

__all__ = ["ACTOR", "ENGINE", "MODEL", "REF", "ROLLOUT", "named"]

ACTOR = "actor_rollout_ref.actor"
REF = "actor_rollout_ref.ref"
MODEL = "actor_rollout_ref.model"
ROLLOUT = "actor_rollout_ref.rollout"
#: what verl hands on to vLLM's engine
ENGINE = f"{ROLLOUT}.engine_kwargs.vllm"


def named(path: str) -> str:
    """How errors call the setting at ``path``."""
    return f"verl setting {path}"
