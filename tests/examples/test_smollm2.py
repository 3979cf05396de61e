"""The demo of a real pretrained model: reasoning-gym's questions and scorer, the warm start, and the conversion's check."""

from __future__ import annotations

import json
import os
import random
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from examples.common.recipe import TASKS, Arm, Recipe
from examples.openrlhf.recipe import Recipe as OpenrlhfRecipe
from examples.smollm2 import convert, mismatch, task
from examples.verl.recipe import Recipe as VerlRecipe
from examples.words import TASK as WORDS
from examples.words.tokenizer import build_tokenizer

ROOT = Path(__file__).resolve().parents[2]
#: what `make demo-verl MODEL=smollm2` and `make test` install
GYM = Path(sys.prefix) / "reasoning-gym"
needs_gym = pytest.mark.skipif(not GYM.is_dir(), reason=f"needs {GYM}, which `make demo-verl MODEL=smollm2` makes")
QUESTION = task.Question("State the final answer to the following arithmetic problem: 27 + 35 =", "62", "27 + 35")


@pytest.fixture
def gym(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(GYM)


def score(text: str, answer: str) -> float:
    return float(runpy.run_path(str(TASKS["smollm2"].reward))["compute_score"](task.NAME, text, answer))


@needs_gym
@pytest.mark.usefixtures("gym")
def test_questions_are_those_of_reasoning_gym_and_none_is_on_both_sides() -> None:
    train, held_out = task.split()
    assert len(held_out) == task.HELD_OUT and len(train) > task.TRAIN // 2 and len(task.warm()) > task.WARM // 2
    assert (train, held_out) == task.split()
    asked = {question.text for question in held_out}
    assert len(asked) == task.HELD_OUT
    assert not asked & {question.text for question in (*train, *task.warm())}
    assert {question.text for question in train} != {question.text for question in task.warm()}
    for question in train[:200]:
        assert question.expression in question.text
        first, sign, second = question.expression.split()
        assert int(question.answer) == int(first) + (int(second) if sign == "+" else -int(second))


@needs_gym
@pytest.mark.usefixtures("gym")
def test_both_forms_of_an_answer_are_right_by_reasoning_gyms_own_scorer() -> None:
    for question in task.warm()[:200]:
        assert score(task.worked_answer(question), question.answer) == score(task.direct_answer(question), question.answer) == 1.0


@needs_gym
@pytest.mark.usefixtures("gym")
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<answer>62</answer>", 1.0), ("<answer>1</answer> <answer> 62.0 </answer>", 1.0), ("62", 0.0), ("", 0.0),
        ("<answer>26</answer>", 0.0), ("<answer>62", 0.0), ("<answer>162</answer>", 2 / 3),
    ],
)  # fmt: skip
def test_the_reward_is_in_the_forms_of_both_frameworks(text: str, expected: float) -> None:
    rewards = runpy.run_path(str(TASKS["smollm2"].reward))
    assert rewards["compute_score"](task.NAME, text, "62", extra_info={"index": 0}, more=None) == expected
    prompt = f"<|im_start|>user\n{QUESTION.text}<|im_end|>\n<|im_start|>assistant\n"
    for query in (prompt + text, prompt + text + "<|im_end|>"):
        assert rewards["reward_func"]([query], [prompt], ["62"])["rewards"] == expected


def test_the_tens_come_first_and_nothing_is_split_that_is_whole() -> None:
    assert task.worked_answer(QUESTION) == "27+30=57, 57+5=62 <answer>62</answer>"
    found = {
        expression: task.worked_answer(task.Question("", str(eval(expression)), expression))
        for expression in ("12 - 87", "7 - 5", "40 + 30")
    }
    assert found == {
        "12 - 87": "12-80=-68, -68-7=-75 <answer>-75</answer>",
        "7 - 5": "7-5=2 <answer>2</answer>",
        "40 + 30": "40+30=70 <answer>70</answer>",
    }
    both = {task.answer(QUESTION, 0.5, random.Random(seed)) for seed in range(20)}
    assert both == {task.worked_answer(QUESTION), task.direct_answer(QUESTION)}


@needs_gym
@pytest.mark.usefixtures("gym")
@pytest.mark.parametrize("recipe", [VerlRecipe, OpenrlhfRecipe])
def test_a_run_reads_the_tasks_data_model_and_reward(recipe: type[Recipe], tmp_path: Path) -> None:
    learner = tmp_path / "learner"
    learner.mkdir()
    (learner / "config.json").write_text("{}")
    made = recipe.of(replace(TASKS["smollm2"], model=learner), steps=3, device=None)
    assert (made.steps, made.device, made.prompts) == (3, "cpu", TASKS["smollm2"].sizes["prompts"])
    text = " ".join(made.launch(Arm(precision="fp8-unified"), tmp_path, tmp_path / "t", tmp_path / "log").command)
    assert str(learner) in text and str(made.task.reward) in text and str(WORDS.reward) not in text
    _, held_out = task.split()
    data = tmp_path / "data"
    if recipe is VerlRecipe:
        import pandas

        first = pandas.read_parquet(data / "held_out.parquet").to_dict("records")[0]
        assert (first["prompt"][0]["content"], first["data_source"]) == (held_out[0].text, task.NAME)
    else:
        first = json.loads((data / "held_out.jsonl").read_text().splitlines()[0])
        assert first == {"input": held_out[0].text, "label": held_out[0].answer, "datasource": task.NAME}


def test_a_model_that_is_not_there_is_one_error_that_says_what_makes_it(tmp_path: Path) -> None:
    absent = replace(TASKS["smollm2"], model=tmp_path / "none")
    with pytest.raises(SystemExit, match=r"none: required a model for sums of two numbers.*make demo-verl MODEL"):
        VerlRecipe.of(absent)


def test_without_the_package_there_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(SystemExit, match=r"found no reasoning_gym\. `make demo-verl MODEL=smollm2` installs them"):
        task.split()


@needs_gym
def test_the_warm_start_teaches_the_answers_and_records_what_it_did(tmp_path: Path) -> None:
    """The whole command, on the tokenizer of the words and a tiny model, which cannot learn to add in three steps."""
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(tmp_path / "model")
    _llama(len(tokenizer)).save_pretrained(tmp_path / "model")
    command = [sys.executable, "-m", "examples.smollm2.warm_start", str(tmp_path / "model"), str(tmp_path / "out")]
    done = subprocess.run(
        [*command, "--steps", "3", "--batch-size", "4"], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(GYM)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "12 questions of reasoning-gym 0.1.25, Apache-2.0" in done.stdout
    record: dict[str, Any] = json.loads((tmp_path / "out" / "warm_start.json").read_text())
    assert (record["steps"], record["batch_size"], record["before"]) == (3, 4, 0.0)
    assert LlamaForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def _llama(vocabulary: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, tie_word_embeddings=True,
        )
    )  # fmt: skip


def test_the_conversion_finds_a_wrong_tensor_and_a_wrong_logit() -> None:
    ids = torch.arange(12)[None]
    source = _llama(128).to(torch.bfloat16)
    largest, likely = convert.compare(source, _llama(128).to(torch.bfloat16), ids)
    assert largest == 0.0 and likely < 0
    other = _llama(128).to(torch.bfloat16)
    other.model.layers[1].mlp.up_proj.weight.data[3, 5] += 0.01
    with pytest.raises(SystemExit, match=r"found others: model\.layers\.1\.mlp\.up_proj\.weight"):
        convert.compare(source, other, ids)
    other = _llama(128).to(torch.bfloat16)
    other.model.rotary_emb.inv_freq *= 2  # no tensor of the checkpoint
    with pytest.raises(SystemExit, match="required the logits of the GGUF's model"):
        convert.compare(source, other, ids)


def test_its_packages_replace_none_of_the_main_environment() -> None:
    def names(file: str) -> set[str]:
        lines = (ROOT / "requirements" / file).read_text().splitlines()
        return {line.partition("==")[0].lower().replace("_", "-") for line in lines if line and not line.startswith("#")}

    assert not names("reasoning-gym.txt") & names("cpu.txt")


def test_the_page_on_the_mismatch_has_the_committed_figures() -> None:
    results = json.loads(mismatch.FIGURES.read_text())
    text = mismatch.PAGE.read_text()
    assert mismatch.page(text, results) == text
    exact = [result for result in results if result["align"] == "exact"]
    assert len(exact) > 10 and all(result["logp_abs_diff_max"] == 0 and result["bit_equal_fraction"] == 1 for result in exact)


def test_prompts_of_long_contexts_are_prose_of_one_length() -> None:
    passages = mismatch.passages()
    assert len(set(passages)) == 16 and {len(passage) for passage in passages} == {24_000}
