"""The MATH files, read back the way the frameworks read them."""

from __future__ import annotations

import json
from pathlib import Path

import pandas
import pytest

from examples.competition_math import DATASET, answer

RECORDS = [
    {"problem": "What is half of one?", "solution": "It is $\\boxed{\\frac{1}{2}}$."},
    {"problem": "How many?", "solution": "First $\\boxed{1}$, then $40+2=\\boxed{42}$."},
]


def test_the_answer_is_the_last_box() -> None:
    assert [answer(record["solution"]) for record in RECORDS] == ["\\frac{1}{2}", "42"]
    with pytest.raises(ValueError, match="required a solution with"):
        answer("It is 42.")


def test_both_files_ask_the_same_and_know_the_answer(tmp_path: Path) -> None:
    parquet, lines = DATASET.write(tmp_path, "train", RECORDS)
    assert (parquet, lines) == (tmp_path / "math" / "train.parquet", tmp_path / "math" / "train.jsonl")
    rows = pandas.read_parquet(parquet)
    other = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [prompt[0]["content"] for prompt in rows["prompt"]] == [row["input"] for row in other]
    assert [model["ground_truth"] for model in rows["reward_model"]] == [row["label"] for row in other]


def test_verl_s_own_reward_and_the_example_s_score_a_right_answer(tmp_path: Path) -> None:
    from verl.utils.reward_score import default_compute_score

    from examples.openrlhf.h100.reward import reward_func

    row = pandas.read_parquet(DATASET.write(tmp_path, "train", RECORDS)[0]).iloc[0]
    truth = row["reward_model"]["ground_truth"]
    for said, score in (("so \\boxed{\\frac{1}{2}}", 1.0), ("so \\boxed{\\frac{1}{3}}", 0.0)):
        assert default_compute_score(row["data_source"], said, truth) == score
        assert reward_func(["Q" + said], ["Q"], [truth])["rewards"] == score
