"""Interleaved timing on the device within a time budget, through CUDA graphs where a call can be captured.

A call receives the number of its turn and uses that turn's operands. Weights that would stay in the L2 cache have several
copies, because a decoding engine finds the next layer's weights in memory, not in the cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

Call = Callable[[int], object]


class Budget:
    """The time budget of a part. It is checked between rows, so a part overruns by one row at most."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds

    @property
    def spent(self) -> bool:
        return self._clock() >= self._end


class Timed(NamedTuple):
    """Best seconds per call, or the reason why there is none; ``graph``: without launch overhead."""

    seconds: float
    graph: bool
    error: str = ""


def copies(size: int, cache: int) -> int:
    """How many operands of ``size`` bytes to rotate so that none is still in the cache; at most 64."""
    return max(1, min(64, -(-2 * cache // max(size, 1))))


class CudaTimer:
    """Runs every function for about ``seconds`` in ``rounds`` turns and keeps the best turn."""

    def __init__(self, seconds: float = 0.03, rounds: int = 3) -> None:
        self.seconds, self.rounds = seconds, rounds

    def __call__(self, calls: Mapping[str, Call]) -> dict[str, Timed]:
        prepared = {name: self._prepared(call) for name, call in calls.items()}
        best: dict[str, Timed] = {}
        for _ in range(self.rounds):
            for name, (run, repeats, graph, error) in prepared.items():
                if error:
                    best[name] = Timed(float("nan"), False, error)
                    continue
                seconds = _elapsed(run) / repeats
                if name not in best or seconds < best[name].seconds:
                    best[name] = Timed(seconds, graph)
        return best

    def _prepared(self, call: Call) -> tuple[Callable[[], object], int, bool, str]:
        """The function to run in a turn, its number of calls, whether it is a graph, and the error, if any."""
        try:
            for turn in range(3):  # compiles kernels and selects algorithms
                call(turn)
            one = _elapsed(lambda: call(0))
        except Exception as error:  # a shape that a library refuses becomes a row and does not end the run
            return (lambda: None), 1, False, f"{type(error).__name__}: {error}".splitlines()[0][:200]
        repeats = max(3, min(200, int(self.seconds / self.rounds / max(one, 1e-6))))

        def several() -> None:
            for turn in range(repeats):
                call(turn)

        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                several()
            graph.replay()
            torch.cuda.synchronize()
        except Exception:  # not every library can be captured; the time then includes launches, and the row says so
            torch.cuda.synchronize()
            return several, repeats, False, ""
        return graph.replay, repeats, True, ""


def _elapsed(run: Callable[[], object]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3
