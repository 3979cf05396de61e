"""The table of field failures names existing tests."""

from __future__ import annotations

import re

import pytest

from tests.docs.test_project import ROOT

SECTION = (ROOT / "docs" / "stability.md").read_text().split("## Field failures", 1)[1]
ROWS = [line for line in SECTION.splitlines() if line.startswith("| ")][2:]


@pytest.mark.parametrize("row", ROWS, ids=[row.split("|")[2].strip() for row in ROWS])
def test_a_failure_is_held_by_tests(row: str) -> None:
    found = re.findall(r"`([\w/]+\.py)::(\w+)`", row)
    assert found
    for file, name in found:
        assert re.search(rf"^(async )?def {name}\(", (ROOT / "tests" / file).read_text(), re.M), f"{file}::{name}"
