"""Public data sets of questions with worked solutions, written for verl and for OpenRLHF."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from examples.verl.data import rows


class Worked(NamedTuple):
    """A question and its answer."""

    text: str
    answer: str


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """One data set.

    Attributes:
        folder: name of the folder of its files.
        source: arguments of ``datasets.load_dataset``.
        question, solution: names of the columns.
        instruction: follows each question.
        answer: takes the answer out of a worked solution.
    """

    folder: str
    source: tuple[str, ...]
    question: str
    solution: str
    instruction: str
    answer: Callable[[str], str]

    def write(self, out: Path, split: str, records: Iterable[Mapping[str, str]]) -> tuple[Path, Path]:
        """Write one split for both frameworks; return the paths for verl and for OpenRLHF.

        OpenRLHF reads its file with ``--data.input_key input --data.label_key label``.
        """
        import pandas

        folder = out / self.folder
        folder.mkdir(parents=True, exist_ok=True)
        parquet, lines = folder / f"{split}.parquet", folder / f"{split}.jsonl"
        found = [Worked(f"{record[self.question]} {self.instruction}", self.answer(record[self.solution])) for record in records]
        pandas.DataFrame(rows(found, self.source[0], split)).to_parquet(parquet)
        lines.write_text("".join(json.dumps({"input": q.text, "label": q.answer}) + "\n" for q in found), encoding="utf-8")
        return parquet, lines

    def main(self, about: str | None) -> None:
        """The command line: write both splits."""
        parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--out", type=Path, required=True)
        parser.add_argument("--source", help="a local copy of the data set, in place of the Hugging Face hub's")
        args = parser.parse_args()

        import datasets

        found = datasets.load_dataset(*([args.source] if args.source else self.source))
        for split in ("train", "test"):
            print(*self.write(args.out, split, found[split]), sep="\n")
