"""Settings that accepted launches give on their command lines, and those among them that nobody has looked at."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from scripts.official.judge import Judged


def unknown(judged: Sequence[Judged], mode: str = "exact") -> Iterator[str]:
    """One line for each setting."""
    found: dict[str, set[str]] = defaultdict(set)
    number: dict[str, int] = defaultdict(int)
    for one in judged:
        if one.kind is not None and one.accepted(mode):
            for name, value in one.set_keys.items():
                found[name].add(value)
                number[name] += 1
    for name in sorted(found):
        yield f"{name} ({number[name]}): {', '.join(sorted(found[name]))[:160]}"
