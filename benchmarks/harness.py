"""What the benchmarks share: interleaved timing, and ``--write``."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from pathlib import Path


def best_of(functions: Mapping[str, Callable[[], object]], seconds: float = 0.3, rounds: int = 7) -> dict[str, float]:
    """Best seconds per call over ``rounds`` rounds. Each function runs for about ``seconds / rounds`` per round.

    The functions take turns, because a busy machine then slows all of them. Process time of all threads counts; other programs
    do not.
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


def asked_to_write(about: str | None, page: Path) -> bool:
    """Whether the command line has ``--write``, its only option."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--write", action="store_true", help=f"write {page}")
    return bool(parser.parse_args().write)
