"""Engines on a double of an H100, with the Python of the installed vLLM: load, trials, graphs, decoding and weight syncs.

No CPU tensor, wrong dtype, host wait in a forward pass or capture, moved parameter, or graph that reads freed memory. Ranks enter
the same collectives and decide alike. Compiled graphs take weights as arguments, and operators return what they describe.
``make engine-matrix`` runs the same cases with the Python of vLLM's CUDA wheels.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cuda_double.compiled import CASES, HERE, check, run_engines

pytest.importorskip("triton")
pytest.importorskip("vllm")

#: the first test runs all cases
pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def found(library: Path) -> dict[str, dict[str, Any]]:
    """All cases, in processes that are forked from one."""
    return run_engines(library, HERE / "operators.json", CASES)


@pytest.mark.parametrize("name", CASES)
def test_an_engine(found: dict[str, dict[str, Any]], name: str) -> None:
    check(name, found[name])
