"""Layers that have one precision together: the experts of a block, which one operation computes.

Checkpoints, exclude patterns and the weight sync name an expert's matrices one by one: ``model.layers.3.mlp.experts.17.up_proj``.
Who counts, watches or moves layers takes the experts of a block as one, by their module's name: ``model.layers.3.mlp.experts``.

This module imports neither torch nor a framework.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

__all__ = ["PARTS", "Part", "matrices_of", "matrix_expert", "matrix_name", "matrix_number", "unit_of", "units"]

Part = Literal["gate_proj", "up_proj", "down_proj"]
#: the matrices of an expert, as transformers names them
PARTS: tuple[Part, ...] = ("gate_proj", "up_proj", "down_proj")
_MATRIX = re.compile(rf"(.*\.experts)\.(\d+)\.({'|'.join(PARTS)})")


def unit_of(layer: str) -> str:
    """The module of experts that a layer is a matrix of; any other layer is itself."""
    found = _MATRIX.fullmatch(layer)
    return found[1] if found else layer


def units(layers: Iterable[str]) -> dict[str, list[str]]:
    """The units of these layers, in their order, each with its layers."""
    found: dict[str, list[str]] = {}
    for layer in layers:
        found.setdefault(unit_of(layer), []).append(layer)
    return found


def matrices_of(unit: str, experts: int) -> list[str]:
    """The layers of a unit of so many experts."""
    return [f"{unit}.{expert}.{part}" for expert in range(experts) for part in PARTS]


def matrix_number(layer: str) -> int | None:
    """The place of an expert's matrix among those of its unit, expert by expert; None for any other layer."""
    found = _MATRIX.fullmatch(layer)
    return len(PARTS) * int(found[2]) + PARTS.index(found[3]) if found else None


def matrix_name(number: int) -> str:
    """The reverse of ``matrix_number``, without the unit: ``17.up_proj``."""
    expert, part = divmod(number, len(PARTS))
    return f"{expert}.{PARTS[part]}"


def matrix_expert(number: int) -> int:
    """The expert that the matrix of this number belongs to."""
    return number // len(PARTS)
