"""Timing on the device: interleaved, through CUDA graphs where a call can be captured, within a budget of seconds.

A call gets its turn's number and takes the operands of that turn: weights that would stay in the L2 cache are held in several
copies, as a decoding engine finds its next layer's weights in memory and not in the cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

Call = Callable[[int], object]


class Budget:
    """Seconds that a part may take; it is asked between rows, so a part ends a row late at most."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds

    @property
    def spent(self) -> bool:
        return self._clock() >= self._end


class Timed(NamedTuple):
    """Best seconds of a call, or why there is none; ``graph`` says whether launching is left out of it."""

    seconds: float
    graph: bool
    error: str = ""


def copies(size: int, cache: int) -> int:
    """How many operands of ``size`` bytes to take turns with, so that none is still in the cache; at most 64."""
    return max(1, min(64, -(-2 * cache // max(size, 1))))


class CudaTimer:
    """Every function runs about ``seconds`` in ``rounds`` turns; the best turn counts."""

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
        """What is run in a turn, how many calls that is, whether it is a graph, or the error."""
        try:
            for turn in range(3):  # compiles, and chooses algorithms
                call(turn)
            one = _elapsed(lambda: call(0))
        except Exception as error:  # a library that refuses a shape is a row, not the end
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
        except Exception:  # not every library can be captured; then launching counts, and the row says so
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
