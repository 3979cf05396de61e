"""Write a task as the two parquet files that verl reads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from examples.common.task import Question, Task


def rows(questions: Sequence[Question], source: str, split: str) -> list[dict[str, Any]]:
    """Questions as verl's rows: chat prompt, ground truth and the row's origin."""
    return [
        {
            "data_source": source,
            "prompt": [{"role": "user", "content": question.text}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(question.answer)},
            "extra_info": {"split": split, "index": i},
        }
        for i, question in enumerate(questions)
    ]


def write(folder: Path, task: Task, held_out: int) -> tuple[Path, Path]:
    """Write ``train.parquet`` and ``held_out.parquet`` (its first ``held_out`` questions); return both paths.

    Raises:
        ValueError: ``held_out`` is not between 1 and the size of the held-out split.
    """
    import pandas

    train, test = task.split()
    if not 0 < held_out <= len(test):
        raise ValueError(f"held_out: required 1 to {len(test)} questions, found {held_out}")
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / "train.parquet", folder / "held_out.parquet"
    pandas.DataFrame(rows(train, task.name, "train")).to_parquet(paths[0])
    pandas.DataFrame(rows(test[:held_out], task.name, "held_out")).to_parquet(paths[1])
    return paths
