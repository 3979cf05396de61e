"""``@pytest.mark.pairs``: of a test's combinations of parameters, enough for every pair of values are quick, the others slow.

One value that is handled wrongly, or two that are wrong only together, still fail a quick test.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import pytest

Pair = tuple[tuple[str, int], tuple[str, int]]


def mark_others_slow(items: Iterable[pytest.Item]) -> None:
    """Mark the combinations that show no further pair of values as slow."""
    tests: dict[str, list[pytest.Function]] = {}
    for item in items:
        if item.get_closest_marker("pairs"):
            assert isinstance(item, pytest.Function)
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for group in tests.values():
        keep = covering([{axis: id(value) for axis, value in item.callspec.params.items()} for item in group])
        for number, item in enumerate(group):
            if number not in keep:
                item.add_marker("slow")


def covering(combinations: Sequence[dict[str, int]]) -> set[int]:
    """Positions of combinations (axis -> a number for its value) in which every pair of values occurs, chosen greedily."""
    pairs: list[set[Pair]] = [set(itertools.combinations(sorted(one.items()), 2)) for one in combinations]
    missing, keep = set().union(*pairs), set[int]()
    while missing:
        best = max(range(len(pairs)), key=lambda number: len(pairs[number] & missing))
        keep.add(best)
        missing -= pairs[best]
    return keep or {0}
