"""Combine sums over the parts of a batch that different processes hold."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import fields
from typing import Any, TypeVar

__all__ = ["merge"]

_Part = TypeVar("_Part")


def merge(kind: type[_Part], parts: Iterable[_Part]) -> _Part:
    """Merge dataclasses into one: ``max_…`` and ``min_…`` fields by maximum and minimum, others by sum. NaN propagates."""
    found = list(parts)
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    return kind(**{name: _combine(name, [getattr(part, name) for part in found]) for name in names})


def _combine(name: str, values: list[Any]) -> Any:
    if any(math.isnan(value) for value in values):
        return math.nan
    if name.startswith("max_"):
        return max(values, default=-math.inf)
    return min(values, default=math.inf) if name.startswith("min_") else sum(values)
