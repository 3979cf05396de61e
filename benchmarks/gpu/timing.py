"""Interleaved timing on the device within a time budget, through CUDA graphs where a call can be captured.

A GPU that was idle runs faster for some milliseconds than it can for long. So all functions of a row first run in turns until the
clocks have settled, then each runs in several windows, again in turns, and the median of its windows counts, never the best.

A call receives the number of its turn and uses that turn's operands. Weights that would stay in the L2 cache have several
copies, because a decoding engine finds the next layer's weights in memory, not in the cache.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from benchmarks.gpu.device import is_broken

Call = Callable[[int], object]
#: a larger spread between windows is noted in the table
UNSTEADY = 0.1


class Timed(NamedTuple):
    """Median seconds per call, or the reason why there is none.

    Attributes:
        graph: without launch overhead.
        spread: between the fastest and the slowest window, as a share of the median.
    """

    seconds: float
    graph: bool
    error: str = ""
    spread: float = 0.0

    @classmethod
    def of(cls, windows: Sequence[float], graph: bool) -> Timed:
        """From the seconds per call of each window."""
        median = statistics.median(windows)
        return cls(median, graph, "", (max(windows) - min(windows)) / median)

    @property
    def note(self) -> str:
        """What a table says beside the figure."""
        noted = [] if self.graph else ["launching included"]
        noted += [f"windows differ by {self.spread:.0%}"] if self.spread > UNSTEADY else []
        return self.error or ", ".join(noted)


def copies(size: int, cache: int) -> int:
    """How many operands of ``size`` bytes to rotate so that none is still in the cache; at most 64."""
    return max(1, min(64, -(-2 * cache // max(size, 1))))


def told(error: Exception) -> str:
    """An error in a cell of a table: what failed is a row without a time, and the others still run.

    Raises the error where it has broken the device, on which nothing else would run.
    """
    if is_broken():
        raise error
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


class CudaTimer:
    """Median of ``rounds`` windows of ``seconds / rounds`` for each function, after ``warm`` seconds of all of them."""

    def __init__(self, seconds: float = 0.2, rounds: int = 5, warm: float = 0.2) -> None:
        self.seconds, self.rounds, self.warm = seconds, rounds, warm

    def __call__(self, calls: Mapping[str, Call]) -> dict[str, Timed]:
        prepared = {name: _prepared(call) for name, call in calls.items()}
        ready = {name: found for name, found in prepared.items() if not isinstance(found, str)}
        found = {name: Timed(math.nan, False, error) for name, error in prepared.items() if isinstance(error, str)}
        found |= {name: Timed.of(windows, ready[name].graph) for name, windows in self._windows(ready).items()}
        return {name: found[name] for name in calls}

    def _windows(self, ready: Mapping[str, _Ready]) -> dict[str, list[float]]:
        """Seconds per call in each window, by name."""
        if not ready:
            return {}
        spent = 0.0
        for one in itertools.cycle(ready.values()):
            spent += _elapsed(one.run)
            if spent >= self.warm:
                break
        again = {name: max(1, math.ceil(self.seconds / self.rounds / _elapsed(one.run))) for name, one in ready.items()}
        windows: dict[str, list[float]] = {name: [] for name in ready}
        for _ in range(self.rounds):
            for name, one in ready.items():
                windows[name].append(_elapsed(one.run, again[name]) / again[name] / one.calls)
        return windows


class _Ready(NamedTuple):
    """A function that has been compiled: ``run`` makes ``calls`` calls, as a graph or one by one."""

    run: Callable[[], object]
    calls: int
    graph: bool


def _prepared(call: Call) -> _Ready | str:
    """What to run, or why a library refuses it: a row, which does not end the run."""
    try:
        for turn in range(3):  # compiles kernels and selects algorithms
            call(turn)
        one = _elapsed(lambda: call(0))
    except Exception as error:
        return told(error)
    calls = max(3, min(100, int(0.01 / max(one, 1e-6))))

    def several() -> None:
        for turn in range(calls):
            call(turn)

    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            several()
        graph.replay()
        torch.cuda.synchronize()
    except Exception:  # not every library can be captured; the time then includes launches, and the row says so
        torch.cuda.synchronize()
        return _Ready(several, calls, False)
    return _Ready(graph.replay, calls, True)


def _elapsed(run: Callable[[], object], times: int = 1) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for _ in range(times):
        run()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3
