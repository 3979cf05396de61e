"""Engines on a double of an H100 with the Python of vLLM's CUDA wheels: ``tests/cuda_double/test_engine.py`` in every version."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from scripts.anchors.cuda_python import LIBRARIES, VERSIONS, unpacked
from tests.cuda_double.compiled import CASES, MORE, check, compile_device, run_engines

#: a version's first test runs all its cases
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]


@cache
def found(version: str) -> dict[str, dict[str, Any]]:
    folder = unpacked(version)
    if folder is None:
        pytest.skip(f"build/cuda-python/{version} is not there: make engine-matrix downloads vLLM's CUDA wheels")
    library: Path | None = compile_device(folder)
    if library is None:
        pytest.skip("no C++ compiler: neither CXX, c++, g++ nor clang++")
    return run_engines(library, folder / LIBRARIES, CASES | MORE, str(folder))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", CASES | MORE)
def test_an_engine(version: str, name: str) -> None:
    check(name, found(version)[name])
