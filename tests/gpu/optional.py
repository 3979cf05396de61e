"""Libraries that a machine with a GPU need not have."""

from __future__ import annotations

from typing import NoReturn

#: begins the reason of a test that is skipped for a library that is not there
NOT_TRIED = "not tried, "


def not_tried(library: str, reason: str) -> NoReturn:
    """Skip the test: the machine lacks the library."""
    import pytest  # pages of a record are written without it

    pytest.skip(f"{NOT_TRIED}{library}: {reason}")
