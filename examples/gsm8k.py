"""GSM8K in verl's and OpenRLHF's formats; ``python -m examples.gsm8k --out FOLDER`` writes all files.

verl: ``gsm8k/train.parquet`` and ``gsm8k/test.parquet``, scored by verl's own reward for GSM8K, which wants ``#### 42``.
OpenRLHF: ``gsm8k/train.jsonl`` and ``gsm8k/test.jsonl``, for ``examples/openrlhf/h100/reward.py``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
DATASET = ("openai/gsm8k", "main")


def answer(solution: str) -> str:
    """The number after ``####`` in a worked solution, without thousands separators."""
    return solution.rpartition("####")[2].strip().replace(",", "")


def verl_rows(records: Iterable[Mapping[str, str]], split: str) -> list[dict[str, Any]]:
    """Records with ``question`` and ``answer`` as verl's rows."""
    return [
        {
            "data_source": DATASET[0],
            "prompt": [{"role": "user", "content": f"{record['question']} {INSTRUCTION}"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": answer(record["answer"])},
            "extra_info": {"split": split, "index": index},
        }
        for index, record in enumerate(records)
    ]


def openrlhf_rows(records: Iterable[Mapping[str, str]]) -> list[dict[str, str]]:
    """The same records as OpenRLHF's rows, for ``--data.input_key input --data.label_key label``."""
    return [
        {"input": f"{record['question']} {INSTRUCTION}", "label": answer(record["answer"])} for record in records
    ]


def write(out: Path, split: str, records: list[Mapping[str, str]]) -> tuple[Path, Path]:
    """Write one split for both frameworks; return the paths for verl and for OpenRLHF."""
    import pandas

    folder = out / "gsm8k"
    folder.mkdir(parents=True, exist_ok=True)
    parquet, lines = folder / f"{split}.parquet", folder / f"{split}.jsonl"
    pandas.DataFrame(verl_rows(records, split)).to_parquet(parquet)
    lines.write_text("".join(json.dumps(row) + "\n" for row in openrlhf_rows(records)), encoding="utf-8")
    return parquet, lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--source", help="a local copy of the data set instead of the Hugging Face hub's")
    args = parser.parse_args()

    import datasets

    found = datasets.load_dataset(args.source) if args.source else datasets.load_dataset(*DATASET)
    for split in ("train", "test"):
        print(*write(args.out, split, list(found[split])), sep="\n")


if __name__ == "__main__":
    main()
