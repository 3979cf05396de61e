"""Libraries that a machine with a GPU may lack."""

from __future__ import annotations

from typing import NoReturn

#: prefix of the reason of a test that is skipped because a library is missing
NOT_TRIED = "not tried, "


def not_tried(library: str, reason: str) -> NoReturn:
    """Skip the test: the machine lacks the library."""
    import pytest  # records' pages are written without it

    pytest.skip(f"{NOT_TRIED}{library}: {reason}")
