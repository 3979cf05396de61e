"""What a part found, in a JSON file that is written after each piece, and the pages made from it."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

from benchmarks.hopper.plan import ESTIMATED, PARTS, Part, table
from scripts.tables import Row, filled, markdown

#: the page about all parts
INDEX = Path(__file__).resolve().parents[2] / "docs" / "benchmarks" / "hopper" / "index.md"
#: title, rows and note of a table
Table = tuple[str, list[Row], str]


class Piece(NamedTuple):
    """What is measured at once: a run is kept, and goes on, piece by piece. ``table`` is the title of the table of its rows."""

    table: str
    name: str
    rows: Callable[[], Iterable[Row]]


@dataclass
class Record:
    """A part's results, by the name of the piece.

    Attributes:
        environment: hardware, software and options of all rows. commands: the command lines that measured them.
        planned: the table of each piece, in order.
        rows, errors: what a piece found, or why it failed.
        missing: unavailable backends and libraries, with the reason.
    """

    part: str
    dry: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    commands: list[str] = field(default_factory=list)
    planned: dict[str, str] = field(default_factory=dict)
    rows: dict[str, list[Row]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    @property
    def left(self) -> list[str]:
        """Pieces that have not ended."""
        return [name for name in self.planned if name not in self.rows | self.errors]

    @property
    def complete(self) -> bool:
        """Whether every piece has ended, failed or not."""
        return bool(self.planned) and not self.left

    @property
    def state(self) -> str:
        """The progress, in words."""
        if not self.planned:
            return "not measured"
        done = f"{len(self.planned) - len(self.left)} of {len(self.planned)} pieces" if self.left else "done"
        return f"{done}, {len(self.errors)} failed" if self.errors else done

    def tables(self) -> dict[str, list[Row]]:
        """Title -> rows of all its pieces, in the order of the plan."""
        found: dict[str, list[Row]] = {title: [] for title in self.planned.values()}
        for piece, title in self.planned.items():
            found[title] += self.rows.get(piece, ())
        return found

    def other(self, here: dict[str, str]) -> str:
        """How this environment differs from that of the rows; "" if the rows may be joined."""
        keys = [key for key in {**self.environment, **here} if self.environment.get(key) != here.get(key) and key != "commit"]
        if not self.rows or not keys:
            return ""
        before, now = (", ".join(f"{key} {side.get(key, 'none')}" for key in keys) for side in (self.environment, here))
        return (
            f"part {self.part}: its other rows were measured with {before}, found {now}. "
            "Measure all again (add --again), or keep both (choose another --out)."
        )

    def save(self, file: Path) -> None:
        """Write the whole file, or leave the old one."""
        file.parent.mkdir(parents=True, exist_ok=True)
        beside = file.with_suffix(".tmp")
        beside.write_text(json.dumps(asdict(self), indent=1) + "\n")
        os.replace(beside, file)


class Setup(NamedTuple):
    """What a part is given.

    Attributes:
        dry: tiny sizes on a CPU.
        scratch: folder for checkpoints and logs.
        deep_gemm: whether DeepGEMM takes part.
    """

    dry: bool
    scratch: Path
    record: Record
    deep_gemm: bool = True

    @property
    def backend(self) -> str:
        """The plugin's ``backend`` in every mode."""
        return "auto" if self.deep_gemm or self.dry else "triton"

    @property
    def device(self) -> str:
        return "cpu" if self.dry else "cuda"


def load(file: Path, part: str) -> Record:
    """The record in a file, or an empty one.

    Raises:
        ValueError: the file is not a record of this part.
    """
    if not file.exists():
        return Record(part)
    try:
        record = Record(**json.loads(file.read_text()))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file} is not a record of make hopper ({error}). Move it away, or repair it.") from None
    if record.part != part:
        raise ValueError(f"{file} is a record of part {record.part!r}, not of {part!r}. Move it away.")
    return record


def page(part: Part, record: Record) -> str:
    """The page of one part."""
    text = f"# {part.title}\n\nPart {part.letter} of [`make hopper`](index.md): {part.what}.\n\n"
    text += "**A dry run on a CPU: no figure here is a measurement.**\n\n" if record.dry else ""
    text += "; ".join(f"{name} {value}" for name, value in record.environment.items())
    text += f". Command: {', '.join(f'`{command}`' for command in record.commands)}.\n"
    if record.left:
        text += f"\n**Incomplete:** not measured: {'; '.join(record.left)}.\n"
    if record.missing:
        text += f"\nUnavailable: {'; '.join(f'{name}: {reason}' for name, reason in record.missing.items())}.\n"
    tables: list[Table] = importlib.import_module(f"benchmarks.hopper.{part.name}").derive(record)
    for title, rows in record.tables().items():
        failed = [f"{piece} failed: {why}" for piece, why in record.errors.items() if record.planned[piece] == title]
        tables.append((title, rows, " ".join(failed)))
    return "\n".join([text, *(markdown(rows, title, note) for title, rows, note in tables if rows or note)])


def write(folder: Path, parts: Iterable[Part] = PARTS) -> None:
    """Write the pages of these parts from the records in ``folder``, and the page about all. An unmeasured part has no page."""
    records = {part.letter: load(folder / f"{part.name}.json", part.name) for part in PARTS}
    rows = table(PARTS, {letter: record.state for letter, record in records.items()})
    folder.mkdir(parents=True, exist_ok=True)
    for part, row in zip(PARTS, rows, strict=True):
        record = records[part.letter]
        if record.rows or record.errors:
            row["part"] = f"[{row['part']}]({part.name}.md)"
            if part in parts:
                (folder / f"{part.name}.md").write_text(page(part, record))
    measured = any(record.rows for record in records.values())
    texts = {
        "state": "" if measured else "**Not measured yet:** no figure of this project comes from a GPU.",
        "parts": markdown(rows, note=f"{ESTIMATED} If a part needs several commands, repeat its command."),
    }
    (folder / "index.md").write_text(filled(INDEX.read_text(), texts))
