"""The GSM8K files, read back the way the frameworks read them."""

from __future__ import annotations

import json
from pathlib import Path

import pandas

from examples.gsm8k import DATASET, answer

RECORDS = [
    {"question": "How many?", "answer": "48/2 = <<48/2=24>>24\n#### 24"},
    {"question": "How much?", "answer": "It is a lot.\n#### 1,200"},
]


def test_the_answer_is_the_number_behind_the_mark() -> None:
    assert [answer(record["answer"]) for record in RECORDS] == ["24", "1200"]


def test_both_files_ask_the_same_and_know_the_answer(tmp_path: Path) -> None:
    parquet, lines = DATASET.write(tmp_path, "train", RECORDS)
    rows = pandas.read_parquet(parquet)
    other = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [prompt[0]["content"] for prompt in rows["prompt"]] == [row["input"] for row in other]
    assert [model["ground_truth"] for model in rows["reward_model"]] == [row["label"] for row in other] == ["24", "1200"]


def test_verl_s_own_reward_and_the_example_s_score_a_right_answer(tmp_path: Path) -> None:
    from verl.utils.reward_score import default_compute_score

    from examples.openrlhf.h100.reward import reward_func

    row = pandas.read_parquet(DATASET.write(tmp_path, "train", RECORDS)[0]).iloc[1]
    truth = row["reward_model"]["ground_truth"]
    for said, score in (("so it is\n#### 1,200", 1.0), ("so it is\n#### 1,201", 0.0)):
        assert default_compute_score(row["data_source"], said, truth) == score
        assert reward_func(["Q" + said], ["Q"], [truth])["rewards"] == score
