"""Forward and backward of a transformer block without attention: timed, and profiled by kernel."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.machine import Machine
from benchmarks.gpu.memory import peak_mib
from benchmarks.gpu.piece import Piece, named
from benchmarks.gpu.shapes import MODELS, TRAIN, Model
from benchmarks.gpu.timing import Call
from jetrl_patch.backends.gpu import GpuBackend
from jetrl_patch.fp8 import producers
from jetrl_patch.fp8.linear import Fp8Linear, Fp8State

EPS, FORMAT = 1e-6, "pow2"
COMPILED, FUSED = "bf16, compiled", ", fused"
#: profiled steps, and kernels listed per step
STEPS, TOP = 3, 12


class Block(nn.Module):
    """norm, qkv, o, norm, gate and up, SiLU * up, down, with both residuals; o reads the queries in place of attention.

    Args:
        backend: backend of the FP8 linears; None means BF16.
        fused: whether norms and SiLU * up return quantized rows.
    """

    def __init__(self, model: Model, device: torch.device, backend: str | None, fused: bool) -> None:
        super().__init__()
        self.state = None if backend is None else Fp8State(FORMAT, backend)
        self.fused = fused
        weights = {"dtype": torch.bfloat16, "device": device}
        self.norms = nn.ParameterList([nn.Parameter(torch.ones(model.hidden, **weights)) for _ in range(2)])  # type: ignore[arg-type]
        for name, N, K in model.linears:
            layer = nn.Linear(K, N, bias=False, **weights)  # type: ignore[arg-type]
            if backend is not None:
                layer.__class__ = Fp8Linear
                layer.fp8 = Fp8State(FORMAT, backend)
            self.add_module(name, layer)
        self.attention = model.heads * model.head_dim

    def forward(self, x: Tensor) -> Tensor:
        y, residual = self._norm(x, 0)
        q = self.qkv(y)[..., : self.attention]
        y, residual = self._norm(residual + self.o(q.contiguous()), 1)
        gate, up = self.gate_up(y).chunk(2, -1)
        y = producers.silu_mul(gate, up, self.state) if self.fused and self.state else None
        down: Tensor = self.down(F.silu(gate) * up if y is None else y)
        return residual + down

    def _norm(self, x: Tensor, i: int) -> tuple[Tensor, Tensor]:
        """The norm of x, and x for the residual."""
        made = producers.rms_norm(x, self.norms[i], EPS, self.state) if self.fused and self.state else None
        if made is not None:
            return made
        wide = x.float()  # as in transformers
        return self.norms[i] * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype), x


def _ways(machine: Machine) -> dict[str, tuple[str | None, bool]]:
    """What ``Block`` is built with, by name."""
    ways: dict[str, tuple[str | None, bool]] = {"bf16": (None, False)}
    for name, backend in machine.backends.items():
        ways[name] = name, False
        if isinstance(backend, GpuBackend):
            ways[name + FUSED] = name, True
    return ways


def _blocks(machine: Machine, model: Model) -> dict[str, Block]:
    return {way: Block(model, machine.device, *given) for way, given in _ways(machine).items()}


def _step(block: nn.Module, x: Tensor, g: Tensor) -> None:
    x = x.detach().requires_grad_()
    torch.autograd.grad(block(x), (x, *block.parameters()), g)


def blocks(machine: Machine, models: Sequence[Model] = MODELS, M: int = TRAIN[-1]) -> Iterator[Piece]:
    """A block's step in BF16, eager and compiled, with FP8 linears, and with norms and activation fused into the quantization."""
    for model in models:
        yield Piece(named(model.name, M), partial(_compared, machine, model, M))


def _compared(machine: Machine, model: Model, M: int) -> Iterator[dict[str, object]]:
    x, g = machine.random(M, model.hidden), machine.random(M, model.hidden)
    made: dict[str, nn.Module] = dict(_blocks(machine, model))
    if machine.compiler:
        made[COMPILED] = torch.compile(made["bf16"], backend=machine.compiler)  # type: ignore[assignment]
    calls: dict[str, Call] = {way: lambda i, b=block: _step(b, x, g) for way, block in made.items()}
    times = machine.timer(calls)
    for way, timed in times.items():
        yield {
            "model": model.name, "M": M, "backend": way, "ms": timed.seconds * 1e3,
            "BF16 / this": times["bf16"].seconds / timed.seconds,
            "compiled BF16 / this": times[COMPILED].seconds / timed.seconds if COMPILED in times else math.nan,
            "peak MiB": "" if timed.error else peak_mib(machine.device, calls[way]), "note": timed.note,
        }  # fmt: skip


def profiles(machine: Machine, models: Sequence[Model] = MODELS[:1], M: int = TRAIN[-1]) -> Iterator[Piece]:
    """The kernels of a block's step from torch's profiler, longest first: time, calls and share of the step."""
    for model in models:
        for way in _ways(machine):
            yield Piece(named(model.name, way, M), partial(_profiled, machine, model, way, M))


def _profiled(machine: Machine, model: Model, way: str, M: int) -> Iterator[dict[str, object]]:
    cuda = machine.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    x, g = machine.random(M, model.hidden), machine.random(M, model.hidden)
    block = Block(model, machine.device, *_ways(machine)[way])
    _step(block, x, g)  # compiles
    with profile(activities=activities) as found:
        for _ in range(STEPS):
            _step(block, x, g)
        if cuda:
            torch.cuda.synchronize()
    times = {}
    for event in found.key_averages():
        if not cuda or event.device_type == DeviceType.CUDA:
            spent = event.self_device_time_total if cuda else event.self_cpu_time_total
            times[event.key] = spent / STEPS, event.count / STEPS
    return _longest({"model": model.name, "backend": way, "M": M}, times)


def _longest(head: dict[str, object], times: dict[str, tuple[float, float]]) -> Iterator[dict[str, object]]:
    whole = sum(us for us, _ in times.values()) or float("nan")
    order = sorted(times.items(), key=lambda item: -item[1][0])
    rest = order[TOP:]
    shown = order[:TOP]
    if rest:
        shown.append((f"{len(rest)} others", (sum(us for _, (us, _) in rest), sum(n for _, (_, n) in rest))))
    for name, (us, calls) in shown:
        yield {**head, "kernel": name[:90], "us": us, "calls": calls, "share": us / whole}
