"""Write a task as the two JSON-lines files that OpenRLHF reads."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

from examples.common.task import Question, Task


def write(folder: Path, task: Task, held_out: int, seed: int) -> tuple[Path, Path]:
    """Write ``train.jsonl`` (shuffled by ``seed``) and the first ``held_out`` held-out questions; return both paths."""
    folder.mkdir(parents=True, exist_ok=True)
    train, test = map(list, task.split())
    random.Random(seed).shuffle(train)
    paths = folder / "train.jsonl", folder / "held_out.jsonl"
    _write(paths[0], train, task.name)
    _write(paths[1], test[:held_out], task.name)
    return paths


def _write(path: Path, questions: Sequence[Question], source: str) -> None:
    rows = ({"input": q.text, "label": str(q.answer), "datasource": source} for q in questions)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
