from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.models import save


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory) -> Path:
    return Path(save(tmp_path_factory.mktemp("models") / "qwen3", "qwen3", steps=1))


@pytest.fixture
def copy(qwen3, tmp_path) -> Path:
    return Path(shutil.copytree(qwen3, tmp_path / "copy"))
