"""Combinations are judged without a crash; those that were wrong once run for real."""

from __future__ import annotations

import pytest

from tests.campaigns.combinations.__main__ import judged, run, wrong, wrong_refusal
from tests.campaigns.combinations.draw import combination
from tests.trl import LIMIT, needs_trl

pytestmark = [needs_trl, pytest.mark.timeout(2 * LIMIT)]

#: seeds whose runs were wrong once -> what was wrong
MENDED = {61: "kv_cache='fp8' on a processor without an FP8 KV cache ended the run when the engine was built"}


def test_each_is_accepted_or_refused_in_one_sentence_or_two() -> None:
    found = judged([combination(seed) for seed in range(1000, 1100)])
    assert {who for who, _ in found.values()} == {"", "plugin", "trl"}
    for error in (error for who, error in found.values() if who == "plugin"):
        assert error.startswith(("ConfigError: ", "ConflictError: ", "ModelError: ")) and len(error) < 600, error


def test_a_seed_stands_for_one_combination() -> None:
    assert combination(3) == combination(3) != combination(4)


@pytest.mark.e2e
@pytest.mark.parametrize("seed", MENDED)
def test_what_was_wrong_once_is_right(seed: int) -> None:
    case = combination(seed)
    (_, said), (error, log, _) = judged([case])[seed], run(case)
    assert not (wrong_refusal(said, error, log) if said else wrong(case, error, log))
