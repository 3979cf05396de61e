"""What tests of verl's driver share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from jetrl_patch import runtime
from jetrl_patch.adapters.verl import state
from jetrl_patch.config import Config


@pytest.fixture
def exact_driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A driver in exact mode, with nothing noted before or after."""
    monkeypatch.setattr(runtime, "is_active", lambda: True)
    monkeypatch.setattr(runtime, "active_config", lambda: Config().resolved())
    state.reset()
    yield
    state.reset()
