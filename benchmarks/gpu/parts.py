"""The parts of a run: products, gradients, quantizers, row equality, whole layers. Each part yields its pieces."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.gpu.launches import ONE_LAUNCH_ROWS, one_launch
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.memory import peak_mib
from benchmarks.gpu.piece import Piece, named
from benchmarks.gpu.shapes import DECODE, MODELS, RANKS, SMALL, TRAIN, Linear, Model
from benchmarks.gpu.timing import Call, copies, told
from jetrl_patch.backends import row_equality
from jetrl_patch.backends.gpu import GpuBackend
from jetrl_patch.fp8.linear import Fp8Linear, Fp8State
from jetrl_patch.kernels.formats import ScaleFormat

Row = dict[str, object]
FORMAT: ScaleFormat = "pow2"
TWO_LAYOUTS = "both layouts"
#: quantizers that every backend has
QUANTIZERS = ("activation 1x128", "tokens 128x1", "weight 128x128")
#: [M, K] that they are measured on; the targets are at the most rows
QUANTIZED = ((64, 3584), (2048, 3584), (16384, 3584), (16384, 18944))


def products(
    machine: Machine, models: Sequence[Model] = MODELS, sizes: Sequence[int] = (*DECODE, *TRAIN)
) -> Iterator[Piece]:
    """FProp of every linear at every M, with quantized operands; in GB/s where memory bandwidth is the limit."""
    for M in sorted(sizes, reverse=True):  # the targets are at the largest
        for model in models:
            for linear in model.linears:
                yield Piece(named(model.name, linear.name, M), partial(_products, machine, model, linear, M))


def _products(machine: Machine, model: Model, linear: Linear, M: int) -> Iterator[Row]:
    _, N, K = linear
    x, weights = machine.random(M, K), [machine.random(N, K) for _ in range(copies(N * K, machine.cache))]
    calls: dict[str, Call] = {"bf16": lambda i: x @ weights[i % len(weights)].t()}
    for name, backend in machine.backends.items():
        q, held = backend.quantize_activation(x, FORMAT), [backend.quantize_weight(w, FORMAT) for w in weights]
        calls[name] = lambda i, b=backend, q=q, w=held: b.gemm(q, w[i % len(w)], torch.bfloat16)
    return _compared(machine, {"model": model.name, "linear": linear.name, "M": M}, calls, (M, N, K))


def gradients(machine: Machine, models: Sequence[Model] = MODELS, sizes: Sequence[int] = TRAIN) -> Iterator[Piece]:
    """DGrad and WGrad of every linear, including their quantization, against BF16 products."""
    for M in sorted(sizes, reverse=True):
        for model in models:
            for linear in model.linears:
                yield Piece(named(model.name, linear.name, M), partial(_gradients, machine, model, linear, M))


def _gradients(machine: Machine, model: Model, linear: Linear, M: int) -> Iterator[Row]:
    _, N, K = linear
    w, x, g = machine.random(N, K), machine.random(M, K), machine.random(M, N)
    both: dict[str, dict[str, Call]] = {"DGrad": {"bf16": lambda i: g @ w}, "WGrad": {"bf16": lambda i: g.t() @ x}}
    for name, backend in machine.backends.items():
        qw, qx = backend.quantize_weight(w, FORMAT), backend.quantize_activation(x, FORMAT)
        both["DGrad"][name] = lambda i, b=backend, q=qw: b.dgrad(g, q, torch.bfloat16)
        both["WGrad"][name] = lambda i, b=backend, q=qx: b.wgrad(g, q, torch.bfloat16)
    for product, calls in both.items():
        head = {"model": model.name, "linear": linear.name, "product": product, "M": M}
        yield from _compared(machine, head, calls, (M, N, K))


def quantizers(
    machine: Machine, shapes: Sequence[tuple[int, int]] = tuple(sorted(QUANTIZED, reverse=True))
) -> Iterator[Piece]:
    """Bandwidth of the quantizers and fused kernels (bytes that must move, over time) relative to the measured copy."""
    for shape in shapes:
        for name in machine.backends:
            yield Piece(named(name, *shape), partial(_quantizers, machine, name, *shape))


def _quantizers(machine: Machine, name: str, M: int, K: int) -> Iterator[Row]:
    backend, x = machine.backends[name], machine.random(M, K)
    ways: dict[str, tuple[int, Callable[[], object]]] = {
        QUANTIZERS[0]: (3, lambda: backend.quantize_activation(x, FORMAT)),
        QUANTIZERS[1]: (3, lambda: backend.quantize_tokens(x, FORMAT)),
        QUANTIZERS[2]: (3, lambda: backend.quantize_weight(x, FORMAT)),
    }
    if isinstance(backend, GpuBackend):
        ways["tokens 128x1, transposed"] = (3, lambda: backend.quantize_transposed(x, FORMAT))
        ways |= _kernels_alone(backend, x)
    calls: dict[str, Call] = {way: lambda i, run=run: run() for way, (_, run) in ways.items()}
    for way, timed in machine.timer(calls).items():
        speed = ways[way][0] * M * K / timed.seconds / 1e9
        yield {
            "backend": name, "quantizer": way, "M, K": f"{M}, {K}", "us": timed.seconds * 1e6, "GB/s": speed,
            "of the copy": speed / machine.ceiling("copy GB/s"), "note": timed.note,
        }  # fmt: skip


def _kernels_alone(backend: GpuBackend, x: torch.Tensor) -> dict[str, tuple[int, Callable[[], object]]]:
    """Operations of the plugin's kernels only: both layouts from one read, fused producers, and their gradients."""
    kernels, producers = backend.quantizers(x), backend.producers(x)
    if kernels is None or producers is None:
        return {}
    from jetrl_patch.kernels.norm import rms_norm_backward
    from jetrl_patch.kernels.silu import silu_mul_backward

    columns, weight, other, rstd = backend.columns, x[0].contiguous(), torch.randn_like(x), torch.ones_like(x[:, 0]).float()
    both = torch.bfloat16, torch.bfloat16
    ways: dict[str, tuple[int, Callable[[], object]]] = {
        TWO_LAYOUTS: (4, lambda: kernels.quantize_both(x, FORMAT, columns=columns, pad=True)),
        "SiLU * up, kept and quantized": (7, lambda: producers.silu_mul_quantize_rows(x, other, FORMAT, columns, keep=True)),
        "SiLU * up, backward": (10, lambda: silu_mul_backward(x, other, x, both)),
    }
    if x.shape[1] <= producers.WIDEST:
        ways["RMSNorm, kept and quantized"] = (
            5, lambda: producers.rmsnorm_quantize_rows(x, weight, 1e-6, FORMAT, keep=True, columns=columns),
        )  # fmt: skip
        norm = x, weight, rstd, other, torch.bfloat16, True
        ways["RMSNorm, backward"] = 6, lambda: rms_norm_backward(*norm)
        ways["RMSNorm, backward, and the residual's"] = 8, lambda: rms_norm_backward(*norm, other)
    return ways


def rows(machine: Machine, models: Sequence[Model] = MODELS[:1], trained: int = TRAIN[-1]) -> Iterator[Piece]:
    """Whether a backend may serve a rollout: decoded rows against the same rows of a training batch, bit for bit."""
    for model in models:
        for linear in model.linears:
            for name, backend in {**machine.backends, **one_launch(machine)}.items():
                decoded = row_equality.DECODED if name in machine.backends else ONE_LAUNCH_ROWS
                given = backend, (linear.N, linear.K), machine.device, FORMAT, trained, decoded
                head = {"backend": name, "model": model.name, "linear": linear.name}
                yield Piece(named(*head.values()), partial(_judged, head, row_equality.compare_rows, *given))


def _judged(head: Row, compare: Callable[..., row_equality.Verdict], *arguments: Any) -> list[Row]:
    return [{**head, **_verdict(compare, *arguments)}]


def _verdict(compare: Callable[..., row_equality.Verdict], *arguments: Any) -> Row:
    try:
        verdict = compare(*arguments)
    except Exception as error:  # a compiler or driver may raise anything; the other rows still run
        verdict = row_equality.Verdict(False, told(error))
    return {"verdict": "may serve" if verdict.ok else "may not serve", "found": verdict.found}


def fused(
    machine: Machine, models: Sequence[Model] = (SMALL, *MODELS), sizes: Sequence[int] = RANKS, trained: int = TRAIN[0]
) -> Iterator[Piece]:
    """The same for rows of fused and tensor-parallel weights against the trainer's whole weights, which have another N."""
    for ranks in sizes:
        for model in models:
            for linear, layout in model.layouts(ranks):
                for name, backend in machine.backends.items():
                    given = backend, (linear.N, linear.K), layout, machine.device, FORMAT, (1, 64, trained)
                    head: Row = {"backend": name, "model": model.name, "TP": ranks, "linear": linear.name}
                    yield Piece(named(*head.values()), partial(_judged, head, row_equality.compare_parts, *given))


def layers(machine: Machine, models: Sequence[Model] = MODELS, sizes: Sequence[int] = TRAIN) -> Iterator[Piece]:
    """Forward and backward of a complete linear layer, the bytes it saves for backward, and its peak memory."""
    for M in sorted(sizes, reverse=True):  # the targets are at the largest
        for model in models:
            for linear in model.linears:
                yield Piece(named(model.name, linear.name, M), partial(_layers, machine, model, linear, M))


def _layers(machine: Machine, model: Model, linear: Linear, M: int) -> Iterator[Row]:
    x, g = machine.random(M, linear.K), machine.random(M, linear.N)
    made = {"bf16": nn.Linear(linear.K, linear.N, bias=False, dtype=torch.bfloat16, device=machine.device)}
    for name in machine.backends:
        layer = nn.Linear(linear.K, linear.N, bias=False, dtype=torch.bfloat16, device=machine.device)
        layer.__class__ = Fp8Linear
        layer.fp8 = Fp8State(FORMAT, name)  # type: ignore[assignment]
        made[name] = layer
    calls: dict[str, Call] = {name: lambda i, l=layer: _step(l, x, g) for name, layer in made.items()}
    times = machine.timer(calls)
    for name, timed in times.items():
        saved = "" if timed.error else _saved(made[name], x)
        peak = "" if timed.error else peak_mib(machine.device, calls[name])
        yield {
            "model": model.name, "linear": linear.name, "M": M, "backend": name, "ms": timed.seconds * 1e3,
            "BF16 / this": times["bf16"].seconds / timed.seconds, "saved MiB": saved, "peak MiB": peak,
            "note": timed.note,
        }  # fmt: skip


def _step(layer: nn.Module, x: torch.Tensor, g: torch.Tensor) -> None:
    x = x.detach().requires_grad_()  # a new tensor, because layers cache their last quantized input
    torch.autograd.grad(layer(x), (x, *layer.parameters()), g)


def _saved(layer: nn.Module, x: torch.Tensor) -> float:
    """MiB that the forward saves for backward besides the weight."""
    storages: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if all(storage.data_ptr() != p.untyped_storage().data_ptr() for p in layer.parameters()):
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x.detach().requires_grad_())
    return sum(storages.values()) / 2**20


def _compared(machine: Machine, head: Row, calls: dict[str, Call], shape: tuple[int, int, int]) -> Iterator[Row]:
    """One row per backend: time, speed, share of its ceiling, and the ratio to BF16 in the same turns."""
    M, N, K = shape
    times = machine.timer(calls)
    for name, timed in times.items():
        kind = "BF16" if name == "bf16" else "FP8"
        size = 2 * (M * K + N * K + M * N) if name == "bf16" else M * K + N * K + 2 * M * N
        compute, memory = 2 * M * N * K / timed.seconds / 1e12, size / timed.seconds / 1e9
        shares = compute / machine.ceiling(f"{kind} TFLOP/s"), memory / machine.ceiling("copy GB/s")
        share = max(shares) if not any(map(math.isnan, shares)) else math.nan
        yield {
            **head, "backend": name, "us": timed.seconds * 1e6, "TFLOP/s": compute, "GB/s": memory,
            "of the ceiling": share, "BF16 / this": times["bf16"].seconds / timed.seconds, "note": timed.note,
        }  # fmt: skip

