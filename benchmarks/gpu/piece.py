"""What a table measures at once, in turns: the unit in which a run is kept and goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple


class Piece(NamedTuple):
    """A name within its table, and what measures it and returns its rows."""

    name: str
    rows: Callable[[], Iterable[dict[str, Any]]]


def named(*parts: object) -> str:
    """The name of a piece from what tells it from the others."""
    return ", ".join(map(str, parts))
