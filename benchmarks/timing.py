"""Interleaved timing: candidate and baseline take turns, so that a busy machine slows both."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping


def best_of(functions: Mapping[str, Callable[[], object]], seconds: float = 0.3, rounds: int = 7) -> dict[str, float]:
    """Seconds per call: the best of ``rounds`` rounds, in each of which every function runs for about ``seconds / rounds``.

    This is process time (all threads), so other programs on the machine do not count.
    """
    repeats = {}
    for name, function in functions.items():
        function()
        start = time.process_time()
        function()
        repeats[name] = max(1, int(seconds / rounds / max(time.process_time() - start, 1e-6)))
    best = dict.fromkeys(functions, float("inf"))
    for _ in range(rounds):
        for name, function in functions.items():
            start = time.process_time()
            for _ in range(repeats[name]):
                function()
            best[name] = min(best[name], (time.process_time() - start) / repeats[name])
    return best


def shown(value: object) -> str:
    """Format a number with three significant digits."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)
