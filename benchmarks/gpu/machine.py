"""The machine of a run: device, measured ceilings, available backends, versions."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata

import torch

from benchmarks.gpu.timing import Call, CudaTimer, Timed
from jetrl_patch.fp8.backends import Backend, capability, get_backend
from jetrl_patch.fp8.formats import FP8

NAMED = ("torch", "triton", "vllm", "deep_gemm", "jetrl_patch")


@dataclass
class Machine:
    """Passed to every part; tests construct one from a CPU and their own clock."""

    device: torch.device
    timer: Callable[[Mapping[str, Call]], dict[str, Timed]]
    backends: dict[str, Backend]
    #: why the other backends are unavailable
    missing: dict[str, str] = field(default_factory=dict)
    #: bytes of the L2 cache
    cache: int = 0
    #: TFLOP/s of BF16 and FP8, GB/s of a copy (read + written); measured first
    ceilings: dict[str, float] = field(default_factory=dict)
    #: side length of the matrices for the ceilings
    side: int = 8192
    #: torch.compile's backend for compiled BF16 baselines; empty if there are none
    compiler: str = ""

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
    for name in NAMED:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
