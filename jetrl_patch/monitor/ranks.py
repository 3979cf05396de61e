"""Gather one object from every trainer rank."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

__all__ = ["everybody"]


def everybody(mine: Any) -> list[Any]:
    """Return the objects of all ranks, in rank order. Collective; without a process group, ``[mine]``."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return [mine]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found
