"""The words example: its questions, answers, reward, tokenizer and checkpoint."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.verl import data
from examples.words import TASK, task
from examples.words.reward import compute_score, final_number
from examples.words.tokenizer import PAD, VOCAB_SIZE, build_tokenizer, vocabulary
from examples.words.warm_start import CHECKPOINT, accuracy, batch, build_model, prompt_ids

TRAIN, HELD_OUT = task.split()
TOKENIZER = build_tokenizer()
questions = st.sampled_from([*TRAIN, *HELD_OUT])
seeds = st.integers(0, 2**31)


def test_there_are_enough_distinct_questions() -> None:
    texts = [q.text for q in (*TRAIN, *HELD_OUT)]
    assert len(set(texts)) == len(texts) >= 5000
    assert len(HELD_OUT) == task.HELD_OUT


def test_no_sum_is_in_both_halves_whatever_its_wording_or_order() -> None:
    assert not {q.key for q in TRAIN} & {q.key for q in HELD_OUT}
    assert not {q.text for q in TRAIN} & {q.text for q in HELD_OUT}


def test_the_same_seed_gives_the_same_split_and_another_seed_another() -> None:
    assert task.split() == (TRAIN, HELD_OUT)
    assert task.split(seed=1) != (TRAIN, HELD_OUT)


def test_most_questions_carry() -> None:
    share = sum(q.carries for q in TRAIN) / len(TRAIN)
    assert 0.65 < share < 0.75


@pytest.mark.parametrize(
    ("n", "text"), [(0, "zero"), (10, "ten"), (19, "nineteen"), (20, "twenty"), (99, "ninety nine")]
)
def test_numbers_in_words(n: int, text: str) -> None:
    assert task.in_words(n) == text


@pytest.mark.parametrize("n", [-1, 100])
def test_numbers_without_words_are_refused(n: int) -> None:
    with pytest.raises(ValueError, match=str(n)):
        task.in_words(n)


@given(questions, seeds)
def test_the_careful_author_is_right(question: task.Question, seed: int) -> None:
    text = task.worked_answer(question, random.Random(seed))
    assert compute_score("words", text, str(question.answer)) == 1.0
    halfway = int(text.split("=")[1].split("=")[0].lstrip().split(",")[0].split(" ")[0])
    assert halfway % 10 == question.a % 10  # the tens come first and leave the ones alone


@given(questions, seeds)
def test_the_hasty_author_is_right_exactly_where_nothing_is_carried(question: task.Question, seed: int) -> None:
    text = task.guessed_answer(question, random.Random(seed))
    assert compute_score("words", text, str(question.answer)) == float(not question.carries)


@given(st.integers(-999, 999), st.sampled_from(["the answer is {}", "1+1=2. it is {}.", "{}", "we get {} \n"]))
def test_the_last_number_is_the_answer(n: int, wording: str) -> None:
    assert final_number(wording.format(n)) == n
    assert compute_score("words", wording.format(n), str(n)) == 1.0
    assert compute_score("words", wording.format(n), str(n + 1), extra_info={"index": 0}, more=None) == 0.0


@pytest.mark.parametrize("text", ["", "the answer is", "12 apples", "it is 12?", "1.5", "twelve", "it is 12 or so"])
def test_anything_else_at_the_end_is_no_answer(text: str) -> None:
    assert final_number(text) is None
    assert compute_score("words", text, "12") == 0.0


@given(st.text())
def test_the_reward_takes_any_text(text: str) -> None:
    assert compute_score("words", text, "12") in (0.0, 1.0)


def test_the_tokenizer_has_the_size_of_the_models_vocabulary() -> None:
    assert len(TOKENIZER) == VOCAB_SIZE == build_model(TOKENIZER, seed=0).config.vocab_size
    assert len(set(vocabulary())) == len(vocabulary()) <= VOCAB_SIZE
    assert VOCAB_SIZE % 64 == 0


@given(questions, seeds)
def test_text_survives_the_tokenizer(question: task.Question, seed: int) -> None:
    rng = random.Random(seed)
    for text in (question.text, task.worked_answer(question, rng), task.guessed_answer(question, rng)):
        ids = TOKENIZER(text)["input_ids"]
        assert TOKENIZER.unk_token_id not in ids
        assert TOKENIZER.decode(ids) == text


def test_the_chat_prompt_ends_where_the_answer_begins() -> None:
    ids = prompt_ids(TOKENIZER, HELD_OUT[0])
    assert TOKENIZER.decode(ids).endswith("<|im_start|>assistant\n")
    assert TOKENIZER.unk_token_id not in ids
    assert TOKENIZER.convert_tokens_to_ids(PAD) not in ids


def test_prompts_and_answers_fit_the_recipe() -> None:
    from examples.verl.recipe import Recipe

    recipe, rng = Recipe(), random.Random(0)
    assert max(len(prompt_ids(TOKENIZER, q)) for q in (*TRAIN, *HELD_OUT)) <= recipe.prompt_tokens
    longest = max(len(TOKENIZER(task.worked_answer(q, rng))["input_ids"]) for q in TRAIN)
    assert longest + 1 <= recipe.response_tokens


def test_a_batch_of_the_warm_start_is_reproducible_and_learns_responses_only() -> None:
    prompts = {q: prompt_ids(TOKENIZER, q) for q in TRAIN[:50]}
    ids, labels = batch(TOKENIZER, prompts, 8, 0.5, random.Random(3))
    again, _ = batch(TOKENIZER, prompts, 8, 0.5, random.Random(3))
    assert ids.tolist() == again.tolist()
    starts = {tuple(p) for p in prompts.values()}
    for row, label in zip(ids.tolist(), labels.tolist(), strict=True):
        first = next(i for i, x in enumerate(label) if x >= 0)
        assert tuple(row[:first]) in starts
        kept = [x for x in label if x >= 0]
        assert kept == row[first : first + len(kept)]
        assert kept[-1] == TOKENIZER.eos_token_id


def test_parquet_files_hold_what_verl_reads(tmp_path: Path) -> None:
    import pandas

    train, held_out = data.write(tmp_path, TASK, 32)
    rows = pandas.read_parquet(held_out).to_dict("records")
    assert len(rows) == 32
    assert len(pandas.read_parquet(train)) == len(TRAIN)
    first = rows[0]
    assert first["prompt"][0]["content"] == HELD_OUT[0].text
    assert first["reward_model"]["ground_truth"] == str(HELD_OUT[0].answer)
    assert {"data_source", "prompt", "reward_model", "extra_info"} <= set(first)


@pytest.mark.parametrize("held_out", [0, -1, task.HELD_OUT + 1])
def test_more_held_out_questions_than_there_are_is_an_error(tmp_path: Path, held_out: int) -> None:
    with pytest.raises(ValueError, match=str(held_out)):
        data.write(tmp_path, TASK, held_out)


def test_the_checkpoint_loads_and_fits_its_tokenizer() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    assert model.config.model_type == "qwen3"
    assert model.config.num_hidden_layers >= 4
    assert model.config.hidden_size >= 256
    assert model.config.head_dim == 64
    assert len(tokenizer) == model.config.vocab_size
    assert tokenizer.get_vocab() == TOKENIZER.get_vocab()
    assert tokenizer.chat_template == TOKENIZER.chat_template
    assert tokenizer.decode(tokenizer(HELD_OUT[0].text)["input_ids"]) == HELD_OUT[0].text
    size = sum(path.stat().st_size for path in CHECKPOINT.iterdir())
    assert size < 10 * 2**20


def test_the_checkpoint_begins_between_20_and_50_percent() -> None:
    record = json.loads((CHECKPOINT / "warm_start.json").read_text())
    assert 0.2 <= record["greedy"] <= 0.5
    assert 0.2 <= record["sampled"] <= 0.5


@pytest.mark.slow
def test_the_recorded_accuracy_is_that_of_the_checkpoint() -> None:
    from transformers import AutoTokenizer, Qwen3ForCausalLM

    from examples.words.warm_start import accuracy

    model = Qwen3ForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.bfloat16)
    found = accuracy(model, AutoTokenizer.from_pretrained(CHECKPOINT), HELD_OUT[:128], temperature=0.0)
    assert 0.15 <= found <= 0.5


def test_the_same_seed_gives_the_same_weights() -> None:

    from examples.words.warm_start import train

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        first, again, other = (train(2, batch_size=4, lr=1e-3, seed=s, report_every=0).state_dict() for s in (5, 5, 6))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_a_mixture_for_the_comparison(tmp_path: Path) -> None:
    """``make compare-moe``: the experts keep blocks of 128 whole, know what the dense model knows, and routes are measured."""
    from transformers import AutoModelForCausalLM

    from examples.common.recipe import Arm
    from examples.verl.recipe import Recipe
    from examples.words.mixture import mixture

    made = mixture(tmp_path / "made", 8)
    written = (made / "model.safetensors").stat().st_mtime_ns
    assert mixture(made, 8) == made and (made / "model.safetensors").stat().st_mtime_ns == written  # made once
    model = AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32)
    config = model.config
    assert (config.model_type, config.num_experts, config.moe_intermediate_size % 128) == ("qwen3_moe", 8, 0)
    experts = model.model.layers[0].mlp.experts.down_proj
    assert not torch.equal(experts[0], experts[1])
    dense = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)
    asked = HELD_OUT[:64]
    same, other = (accuracy(each, TOKENIZER, asked, 0.0) for each in (model, dense))
    assert abs(same - other) < 0.1 and other > 0.2
    recipe = Recipe(model=made, measure_routes=True, held_out=8)
    launch = recipe.launch(Arm(precision="bf16"), tmp_path, tmp_path, tmp_path / "log")
    assert launch.env["JETRL_MEASURE_ROUTES"] == "1" and f"actor_rollout_ref.model.path={made}" in launch.command
    replaying = Arm(precision="fp8-rollout", router_replay="R3")
    assert recipe.launch(replaying, tmp_path, tmp_path, tmp_path / "log").env["JETRL_ROUTER_REPLAY"] == "R3"
    dense_run = Recipe(held_out=8).launch(Arm(precision="bf16"), tmp_path, tmp_path, tmp_path / "log")
    assert dense_run.env["JETRL_MEASURE_ROUTES"] == "0"
