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

#: the first test runs all cases of its kind
pytestmark = pytest.mark.timeout(1800)
#: these differ from the others in one setting, which another of those has too
SLOW = ("exact, mixture", "exact, two ranks", "linear")


def run(library: Path, *names: str) -> dict[str, dict[str, Any]]:
    """These cases, in processes that are forked from one."""
    return run_engines(library, HERE / "operators.json", {name: CASES[name] for name in names})


@pytest.fixture(scope="module")
def quick(library: Path) -> dict[str, dict[str, Any]]:
    return run(library, *(name for name in CASES if name not in SLOW))


@pytest.fixture(scope="module")
def slow(library: Path) -> dict[str, dict[str, Any]]:
    return run(library, *SLOW)


@pytest.mark.parametrize("name", [name for name in CASES if name not in SLOW])
def test_an_engine(quick: dict[str, dict[str, Any]], name: str) -> None:
    check(name, quick[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_an_engine_with_less(slow: dict[str, dict[str, Any]], name: str) -> None:
    check(name, slow[name])
