"""Sums in words: the questions, their split, and the two authors whose answers the warm start imitates.

A question is one line, such as ``what is twenty seven plus thirty five?``. Its answer is a number in digits. Operands
run from 10 to 99, the operation is plus or minus, and seven questions in ten need a carry or a borrow.

The warm-start answers have two authors. One works in steps and is right::

    in steps: 27+30=57, 57+5=62. the answer is 62

The other guesses and forgets the carry::

    i think the answer is 52

A model that imitates both guesses most of the time. Reinforcement learning sees only right and wrong, and has
to discover that working in steps pays. The wording (opening, joint, closing phrase) is free and never rewarded.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen"
).split()
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()

PLUS = (
    "what is {a} plus {b}?",
    "how much is {a} and {b}?",
    "what do {a} and {b} make?",
    "add {b} to {a}.",
)
MINUS = (
    "what is {a} minus {b}?",
    "how much is {a} less {b}?",
    "what is left of {a} without {b}?",
    "take {b} from {a}.",
)
WORKED_OPENINGS = ("in steps:", "let us see:", "step by step:", "slowly:")
GUESSED_OPENINGS = ("i think", "easy,", "i guess", "surely")
JOINTS = (", ", ", then ", " and ", ", so ")
CLOSINGS = ("the answer is", "it is", "that makes", "we get")

SPLIT_SEED = 0
HELD_OUT = 512
CARRY_SHARE = 0.7
LOWEST, HIGHEST = 10, 99


@dataclass(frozen=True)
class Question:
    """One question: ``a op b``, where ``op`` is ``+`` or ``-``, and its wording."""

    a: int
    op: str
    b: int
    text: str

    @property
    def answer(self) -> int:
        return self.a + self.b if self.op == "+" else self.a - self.b

    @property
    def carries(self) -> bool:
        """Whether adding the ones digits carries, or subtracting them borrows."""
        return self.a % 10 + self.b % 10 > 9 if self.op == "+" else self.a % 10 < self.b % 10

    @property
    def key(self) -> tuple[str, int, int]:
        """Identifies the sum independently of wording and order: 12+34 and 34+12 have the same key."""
        return (self.op, min(self.a, self.b), max(self.a, self.b))


def in_words(n: int) -> str:
    """``27`` -> ``twenty seven``, for 0 <= n <= 99.

    Raises:
        ValueError: n is outside that range.
    """
    if not 0 <= n <= 99:
        raise ValueError(f"in_words: required a number from 0 to 99, found {n}")
    if n < 20:
        return ONES[n]
    tens, ones = divmod(n, 10)
    return TENS[tens - 2] + (f" {ONES[ones]}" if ones else "")


def all_questions(seed: int = SPLIT_SEED) -> list[Question]:
    """Every question that carries, and as many others as make the share CARRY_SHARE; each in one wording; shuffled."""
    rng = random.Random(seed)
    hard: list[Question] = []
    easy: list[Question] = []
    for a in range(LOWEST, HIGHEST + 1):
        for b in range(LOWEST, HIGHEST + 1):
            for op, wordings in (("+", PLUS), ("-", MINUS)):
                if op == "-" and a <= b:
                    continue
                text = rng.choice(wordings).format(a=in_words(a), b=in_words(b))
                question = Question(a, op, b, text)
                (hard if question.carries else easy).append(question)
    rng.shuffle(easy)
    questions = hard + easy[: round(len(hard) * (1 - CARRY_SHARE) / CARRY_SHARE)]
    rng.shuffle(questions)
    return questions


def split(seed: int = SPLIT_SEED, held_out: int = HELD_OUT) -> tuple[list[Question], list[Question]]:
    """``(train, held_out)``; no sum occurs in both, in any order or wording."""
    questions = all_questions(seed)
    test: list[Question] = []
    keys: set[tuple[str, int, int]] = set()
    for question in questions:
        if len(test) < held_out and question.key not in keys:
            test.append(question)
            keys.add(question.key)
    return [q for q in questions if q.key not in keys], test


def worked_answer(question: Question, rng: random.Random) -> str:
    """An answer of the careful author: first the tens, then the ones; always right."""
    a, op, b = question.a, question.op, question.b
    tens, ones = b // 10 * 10, b % 10
    halfway = a + tens if op == "+" else a - tens
    steps = f"{a}{op}{tens}={halfway}{rng.choice(JOINTS)}{halfway}{op}{ones}={question.answer}."
    return f"{rng.choice(WORKED_OPENINGS)} {steps} {rng.choice(CLOSINGS)} {question.answer}"


def guess(question: Question) -> int:
    """The hasty author's result: digit by digit, without carry or borrow."""
    a, b = question.a, question.b
    if question.op == "+":
        return (a // 10 + b // 10) * 10 + (a % 10 + b % 10) % 10
    return (a // 10 - b // 10) * 10 + (a % 10 - b % 10) % 10


def guessed_answer(question: Question, rng: random.Random) -> str:
    """An answer of the hasty author: no steps, right only where nothing carries or borrows."""
    return f"{rng.choice(GUESSED_OPENINGS)} {rng.choice(CLOSINGS)} {guess(question)}"
