"""What the checks of Megatron and of VeOmni share: whether such an engine trains, and whether it computes the reference too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jetrl_patch.adapters.verl.paths import ACTOR, REF
from jetrl_patch.config import Config
from jetrl_patch.errors import ConfigError, explain

__all__ = ["Select", "mixed", "runs"]

#: returns verl's setting at a dotted path, None where it is missing
Select = Callable[[str], Any]


def runs(strategy: str, select: Select, config: Config) -> bool:
    """Whether an engine trains the actor or computes the reference, in a mode with a quantized rollout."""
    return config.quantized_rollout and strategy in (select(f"{ACTOR}.strategy"), select(f"{REF}.strategy"))


def mixed(strategy: str, select: Select) -> ConfigError | None:
    """An error if another engine than this one trains the actor or computes the reference."""
    found = {path: select(f"{path}.strategy") for path in (ACTOR, REF)}
    if all(value is None or value == strategy for value in found.values()):
        return None
    required, fix = "one engine for actor and reference", f"set model_engine={strategy}"
    words = " and ".join(repr(value) for value in found.values())
    return ConfigError(explain(f"verl settings {ACTOR}.strategy and {REF}.strategy", required=required, found=words, fix=fix))
