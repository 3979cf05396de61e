"""The combinations that stay quick under ``@pytest.mark.pairs``."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pairs import covering

TEST = """
import pytest

@pytest.mark.pairs
@pytest.mark.parametrize("shape", [1, 2, 3])
@pytest.mark.parametrize(("a", "b"), [(1, 2), (3, 4)])
@pytest.mark.parametrize("last", "xy")
def test_of_twelve(shape, a, b, last):
    pass

@pytest.mark.parametrize("shape", [1, 2])
def test_of_two(shape):
    pass
"""


@pytest.mark.parametrize("sizes", [(1,), (5,), (8, 4), (8, 4, 4), (3, 3, 3, 2)], ids=str)
def test_every_pair_of_values_occurs(sizes: tuple[int, ...]) -> None:
    axes = [f"axis{number}" for number in range(len(sizes))]
    every = [dict(zip(axes, values, strict=True)) for values in itertools.product(*map(range, sizes))]
    chosen = [every[number] for number in covering(every)]
    for one, two in itertools.combinations(axes, 2):
        assert {(c[one], c[two]) for c in chosen} == {(c[one], c[two]) for c in every}
    largest = sorted(sizes)[-2:]
    assert len(chosen) <= 1.6 * (largest[0] * largest[1] if len(sizes) > 1 else 1)


def test_the_others_are_slow(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow\n    pairs\n    e2e\n")
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_collection_modifyitems\n")
    root = Path(__file__).resolve().parents[1]
    for which, count in (("not slow", 6 + 2), ("slow", 6)):
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", which, str(tmp_path)]
        run = subprocess.run(command, cwd=root, capture_output=True, text=True)
        assert f"{count} passed" in run.stdout, run.stdout
