"""MATH in verl's and OpenRLHF's formats; ``python -m examples.competition_math --out FOLDER`` writes all files.

verl: ``math/train.parquet`` and ``math/test.parquet``, scored by verl's own reward for MATH, which reads the last ``\\boxed{}``.
OpenRLHF: ``math/train.jsonl`` and ``math/test.jsonl``, for ``examples/openrlhf/h100/reward.py``. The rows are those of
``examples.gsm8k``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from examples.openrlhf.h100.reward import boxed

INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."
DATASET = "DigitalLearningGmbH/MATH-lighteval"


def answer(solution: str) -> str:
    """The content of the last ``\\boxed{…}`` of a worked solution.

    Raises:
        ValueError: there is none.
    """
    found = boxed(solution)
    if found is None:
        raise ValueError(f"required a solution with \\boxed{{}}, found {solution[-80:]!r}")
    return found


def verl_rows(records: Iterable[Mapping[str, str]], split: str) -> list[dict[str, Any]]:
    """Records with ``problem`` and ``solution`` as verl's rows."""
    return [
        {
            "data_source": DATASET,
            "prompt": [{"role": "user", "content": f"{record['problem']} {INSTRUCTION}"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": answer(record["solution"])},
            "extra_info": {"split": split, "index": index},
        }
        for index, record in enumerate(records)
    ]


def openrlhf_rows(records: Iterable[Mapping[str, str]]) -> list[dict[str, str]]:
    """The same records as OpenRLHF's rows, for ``--data.input_key input --data.label_key label``."""
    return [{"input": f"{record['problem']} {INSTRUCTION}", "label": answer(record["solution"])} for record in records]


def write(out: Path, split: str, records: list[Mapping[str, str]]) -> tuple[Path, Path]:
    """Write one split for both frameworks; return the paths for verl and for OpenRLHF."""
    import pandas

    folder = out / "math"
    folder.mkdir(parents=True, exist_ok=True)
    parquet, lines = folder / f"{split}.parquet", folder / f"{split}.jsonl"
    pandas.DataFrame(verl_rows(records, split)).to_parquet(parquet)
    lines.write_text("".join(json.dumps(row) + "\n" for row in openrlhf_rows(records)), encoding="utf-8")
    return parquet, lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--source", default=DATASET, help="a local copy of the data set instead of the Hugging Face hub's")
    args = parser.parse_args()

    import datasets

    found = datasets.load_dataset(args.source)
    for split in ("train", "test"):
        print(*write(args.out, split, list(found[split])), sep="\n")


if __name__ == "__main__":
    main()
