"""A trainer's ranks that split a layer, the vocabulary or the sequences have the bits of one rank that holds all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.forks import facts

SCRIPT = Path(__file__).with_name("split_script.py")


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(("what", "count"), [("rows", 9), ("vocabulary", 12), ("heads", 6)])
def test_split_over_ranks(what: str, count: int, ranks: int) -> None:
    found = facts(SCRIPT, ranks, what)
    assert len(found) == count and all(found.values()), found
