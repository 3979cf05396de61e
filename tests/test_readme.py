"""The README: its two commands, and the order of its sections."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_it_is_short_and_starts_with_claim_and_status():
    text = README.read_text()
    assert len(text.splitlines()) <= 100
    sections = re.findall(r"^## (.*)$", text, flags=re.MULTILINE)
    assert sections == ["Start", "Install", "Result", "Limits", "Links"]
    assert text.index("**Status.**") < text.index("## Start")


def test_the_two_commands_and_the_measured_table_stand_in_it():
    text = README.read_text()
    assert "make demo" in text
    assert "make test" in text
    assert text.count("<!-- compare-table -->") == text.count("<!-- /compare-table -->") == 1
