"""Dotted paths of verl's configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["ACTOR", "ENGINE", "MODEL", "REF", "ROLLOUT", "model_folder", "named"]

ACTOR = "actor_rollout_ref.actor"
REF = "actor_rollout_ref.ref"
MODEL = "actor_rollout_ref.model"
ROLLOUT = "actor_rollout_ref.rollout"
#: arguments that verl passes to vLLM's engine
ENGINE = f"{ROLLOUT}.engine_kwargs.vllm"


def named(path: str) -> str:
    """Name the setting at ``path`` in an error."""
    return f"verl setting {path}"


def model_folder(select: Callable[[str], Any]) -> Any:
    """Return the folder or name from which the model's configuration is read. ``select`` reads verl's setting at a path."""
    return select(f"{MODEL}.hf_config_path") or select(f"{MODEL}.path")
