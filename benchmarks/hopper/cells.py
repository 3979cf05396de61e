"""What the modules of the parts have in common: cells, and what a cell is given."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu.piece import Piece
from benchmarks.hopper.record import Record, Rows

#: rows of each cell, by its name
Cells = Mapping[str, Rows]


@dataclass
class Setup:
    """What the cells of a part are given.

    Attributes:
        dry: tiny sizes on a CPU.
        scratch: folder for checkpoints and logs.
        record: what has been found so far.
        deep_gemm: whether DeepGEMM takes part.
    """

    dry: bool
    scratch: Path
    record: Record
    deep_gemm: bool = True

    @property
    def backend(self) -> str:
        """The setting of every arm of the plugin."""
        return "auto" if self.deep_gemm or self.dry else "triton"

    @property
    def device(self) -> str:
        return "cpu" if self.dry else "cuda"


class Cell(NamedTuple):
    """A cell.

    Attributes:
        title: of its table.
        run: yields its pieces, given the names of those that need not be measured; it may yield them all the same.
        seconds: no piece is begun after so many, and no cell without so many left of a command.
    """

    title: str
    run: Callable[[Collection[str]], Iterator[Piece]]
    seconds: float


def whole(rows: Callable[[], Iterable[dict[str, Any]]]) -> Callable[[Collection[str]], Iterator[Piece]]:
    """A cell of one piece."""
    return lambda done: iter([Piece("all", rows)])


class Derived(NamedTuple):
    """A table that follows from the cells' rows."""

    title: str
    rows: Rows
    note: str = ""


def ratio(above: object, below: object) -> float | str:
    """A quotient of two figures; "" if one is missing."""
    if isinstance(above, (int, float)) and isinstance(below, (int, float)) and below:
        return above / below
    return ""
