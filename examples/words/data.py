"""Write the task as the two parquet files that verl reads: ``python -m examples.words.data --out FOLDER``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from examples.words import task

DATA_SOURCE = "words"


def rows(questions: Sequence[task.Question], name: str) -> list[dict[str, Any]]:
    """Questions as verl's rows: chat prompt, ground truth and the row's origin."""
    return [
        {
            "data_source": DATA_SOURCE,
            "prompt": [{"role": "user", "content": question.text}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(question.answer)},
            "extra_info": {"split": name, "index": i},
        }
        for i, question in enumerate(questions)
    ]


def write(folder: Path, held_out: int = task.HELD_OUT) -> tuple[Path, Path]:
    """Write ``train.parquet`` and ``held_out.parquet`` (its first ``held_out`` questions); return both paths.

    Raises:
        ValueError: ``held_out`` is not between 1 and the size of the held-out split.
    """
    import pandas

    if not 0 < held_out <= task.HELD_OUT:
        raise ValueError(f"held_out: required 1 to {task.HELD_OUT} questions, found {held_out}")
    folder.mkdir(parents=True, exist_ok=True)
    train, test = task.split()
    paths = folder / "train.parquet", folder / "held_out.parquet"
    pandas.DataFrame(rows(train, "train")).to_parquet(paths[0])
    pandas.DataFrame(rows(test[:held_out], "held_out")).to_parquet(paths[1])
    return paths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    print(*write(parser.parse_args().out), sep="\n")


if __name__ == "__main__":
    main()
