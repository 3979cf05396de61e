"""GSM8K in verl's and OpenRLHF's formats; ``python -m examples.gsm8k --out FOLDER`` writes all files.

verl: ``gsm8k/train.parquet`` and ``gsm8k/test.parquet``, scored by verl's own reward for GSM8K, which requires ``#### 42``.
OpenRLHF: ``gsm8k/train.jsonl`` and ``gsm8k/test.jsonl``, for ``examples/openrlhf/h100/reward.py``.
"""

from __future__ import annotations

from examples.common.dataset import Dataset


def answer(solution: str) -> str:
    """The number after ``####`` in a worked solution, without thousands separators."""
    return solution.rpartition("####")[2].strip().replace(",", "")


DATASET = Dataset(
    folder="gsm8k",
    source=("openai/gsm8k", "main"),
    question="question",
    solution="answer",
    instruction='Let\'s think step by step and output the final answer after "####".',
    answer=answer,
)

if __name__ == "__main__":
    DATASET.main(__doc__)
