"""MATH in verl's and OpenRLHF's formats; ``python -m examples.competition_math --out FOLDER`` writes all files.

verl: ``math/train.parquet`` and ``math/test.parquet``, scored by verl's own reward for MATH, which reads the last ``\\boxed{}``.
OpenRLHF: ``math/train.jsonl`` and ``math/test.jsonl``, for ``examples/openrlhf/h100/reward.py``.
"""

from __future__ import annotations

from examples.common.dataset import Dataset
from examples.openrlhf.h100.reward import boxed


def answer(solution: str) -> str:
    """The content of the last ``\\boxed{…}`` of a worked solution.

    Raises:
        ValueError: there is none.
    """
    found = boxed(solution)
    if found is None:
        raise ValueError(f"required a solution with \\boxed{{}}, found {solution[-80:]!r}")
    return found


DATASET = Dataset(
    folder="math",
    source=("DigitalLearningGmbH/MATH-lighteval",),
    question="problem",
    solution="solution",
    instruction="Let's think step by step and output the final answer within \\boxed{}.",
    answer=answer,
)

if __name__ == "__main__":
    DATASET.main(__doc__)
