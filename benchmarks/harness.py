"""What the benchmarks share: interleaved timing, and ``--write``."""

from __future__ import annotations

import argparse
import re
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


def extra_memory(run: Callable[[], object], device: str = "cpu") -> int:
    """Run it; return how many bytes it takes at most, of this process (Linux) or on its GPU."""
    if device != "cpu":
        import torch

        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # restarts the peak
    run()
    return _resident("VmHWM") - before


def _resident(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def asked_to_write(about: str | None, page: Path) -> bool:
    """Whether the command line has ``--write``, its only option."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--write", action="store_true", help=f"write {page}")
    return bool(parser.parse_args().write)
