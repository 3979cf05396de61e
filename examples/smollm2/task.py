"""Sums of two numbers, made by the package reasoning-gym (Apache-2.0), and the answers that the warm start imitates.

A question is an item of its ``chain_sum``: two terms of one or two digits, plus or minus. The scorer is reasoning-gym's own
(``reward.py``), on what stands between ``<answer>`` and ``</answer>``, as reasoning-gym's prompts ask for it.

The warm start's answers are all right and have two forms. One takes the tens first, then the ones::

    27+30=57, 57+5=62 <answer>62</answer>

The other is the answer alone. A small model is more often right in the first form, which reinforcement learning has to find out.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

#: the name of the data set in reasoning-gym
NAME = "chain_sum"
HELD_OUT, TRAIN, WARM = 128, 2048, 4096
#: item i of a data set of reasoning-gym is made from ``seed + i``, so the seeds of sets that must differ are far apart
_HELD_OUT_SEED, _TRAIN_SEED, _WARM_SEED = 0, 1_000_000, 2_000_000


@dataclass(frozen=True)
class Question:
    """One question: the text that reasoning-gym asks, its answer, and the expression in it, ``27 + 35``."""

    text: str
    answer: str
    expression: str


def questions(seed: int, size: int) -> list[Question]:
    """The first ``size`` questions of a seed."""
    try:
        from reasoning_gym import create_dataset
    except ModuleNotFoundError as error:
        raise SystemExit(
            f"examples.smollm2: required the package reasoning-gym and what it imports, found no {error.name}. "
            "`make demo-verl MODEL=smollm2` installs them."
        ) from None
    sizes = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
    items = create_dataset(NAME, seed=seed, size=size, **sizes)
    return [Question(item["question"], item["answer"], item["metadata"]["expression"]) for item in items]


def split() -> tuple[list[Question], list[Question]]:
    """``(train, held_out)``; no question is in both."""
    held_out = _held_out()
    return _without(held_out, questions(_TRAIN_SEED, TRAIN)), held_out


def warm() -> list[Question]:
    """The warm start's questions: of another seed than those to train on, and none of them held out."""
    return _without(_held_out(), questions(_WARM_SEED, WARM))


def _held_out() -> list[Question]:
    return list(dict.fromkeys(questions(_HELD_OUT_SEED, 2 * HELD_OUT)))[:HELD_OUT]


def _without(held_out: list[Question], found: list[Question]) -> list[Question]:
    kept = set(held_out)
    return [question for question in found if question not in kept]


def worked_answer(question: Question) -> str:
    """The tens first, then the ones; the answer at once where there is nothing to split."""
    first, sign, second = question.expression.split()
    tens, ones = int(second) // 10 * 10, int(second) % 10
    if not tens or not ones:
        return f"{first}{sign}{second}={question.answer} {direct_answer(question)}"
    halfway = int(first) + (tens if sign == "+" else -tens)
    return f"{first}{sign}{tens}={halfway}, {halfway}{sign}{ones}={question.answer} {direct_answer(question)}"


def direct_answer(question: Question) -> str:
    """The answer alone."""
    return f"<answer>{question.answer}</answer>"


def answer(question: Question, worked_share: float, rng: random.Random) -> str:
    """One of the two forms, the first with a probability of ``worked_share``."""
    return worked_answer(question) if rng.random() < worked_share else direct_answer(question)
