"""Entries of the plugin in vLLM's registries: how one goes in, and whether all of them are in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jetrl_patch.adapters.base import Journal
from jetrl_patch.errors import ConflictError, explain

__all__ = ["REGISTRIES", "Registries", "claim"]


@dataclass
class Registries:
    """Of this process. ``filled``: the quantization, the ops and the attention of the session are registered."""

    filled: bool = False


REGISTRIES = Registries()


def claim(journal: Journal, registry: Any, key: Any, value: Any, *, target: str, reason: str) -> None:
    """Put an entry into a vLLM registry. Raises ConflictError if another plugin holds the key."""
    held = registry.get(key)
    if held is not None:
        fix = "disable the plugin that registered it"
        raise ConflictError(explain(target, required="an entry that is free", found=repr(held), fix=fix))
    journal.set_item(registry, key, value, target=target, reason=reason)
