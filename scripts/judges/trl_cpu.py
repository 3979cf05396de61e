"""A pytest plugin for TRL's tests: what they skip for lack of a server runs, and a helper that TRL has removed since is there."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

#: reason of TRL's tests with vLLM that are skipped everywhere
_NO_SERVER = "We should add a mock for the vLLM server."


def pytest_configure(config: pytest.Config) -> None:
    helpers: Any = importlib.import_module("trl.import_utils")
    if not hasattr(helpers, "is_joblib_available"):
        helpers.is_joblib_available = lambda: True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """TRL colocates vLLM by default, so these need no server."""
    for item in items:
        item.own_markers = [mark for mark in item.own_markers if mark.kwargs.get("reason") != _NO_SERVER]
