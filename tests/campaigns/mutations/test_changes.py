"""The changes still apply: what they replace occurs once, and Python can compile the result."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.campaigns.mutations.changes import Change, changes

ROOT = Path(__file__).resolve().parents[3]


def test_there_are_enough() -> None:
    every = list(changes())
    assert len(every) >= 60
    assert len({(change.file, change.old) for change in every}) == len(every)


@pytest.mark.parametrize("change", changes(), ids=lambda change: change.name)
def test_a_change_applies(change: Change) -> None:
    source = (ROOT / change.file).read_text()
    assert source.count(change.old) == 1 and change.new != change.old
    if change.file.endswith(".py"):
        compile(source.replace(change.old, change.new), change.file, "exec")
    assert all((ROOT / test.partition("::")[0]).is_file() for test in change.tests)
