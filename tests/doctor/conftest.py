"""A model to ask the doctor about."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.doctor import judged


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return judged.furnish(tmp_path_factory.mktemp("model"))
