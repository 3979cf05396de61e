"""Part f: the linears of an 8B model, by every backend, relative to BF16, to published peaks, and to targets.

Times are medians over CUDA graphs, or over single calls where a library cannot be captured. Every function runs twice, in turns,
and the second run counts, because an idle GPU is faster than it can sustain.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.hopper.plan import Setup
from benchmarks.hopper.record import MISSED
from benchmarks.shapes import MODELS, PUBLISHED, Model, gemm_seconds
from jetrl_patch.backends import Backend, capability, get_backend
from jetrl_patch.fp8.convert import swap_linears
from scripts.tables import Row

BF16, FPROP, LAYER, DECODE = "BF16", "FProp, quantized operands", "forward and backward", "decode, with quantization"
#: what is timed, and rows of X
CASES = ((FPROP, 16384), (LAYER, 16384), (DECODE, 64), (FPROP, 2048), (LAYER, 2048), (DECODE, 1), (DECODE, 8), (DECODE, 256))
#: the least time of BF16 over that of the first of ``OURS`` that this machine has: what backend="auto" picks
TARGETS = {(FPROP, 16384): 1.6, (LAYER, 16384): 1.41, (DECODE, 64): 1.5}
OURS = ("deep_gemm", "triton")
TINY = Model("tiny", hidden=128, intermediate=256, heads=2, kv_heads=1, head_dim=64)

Calls = Mapping[str, Callable[[], object]]


def pieces(dry: bool) -> list[str]:
    return ["linears"]


def measure(name: str, setup: Setup) -> list[Row]:
    found = {key: check() for key, check in capability.CHECKS.items() if setup.backend == "auto" or key != "deep_gemm"}
    usable = ["torch", "native"] if setup.dry else [key for key, (ok, _) in found.items() if ok]
    model, cases = (TINY, ((FPROP, 256), (LAYER, 256), (DECODE, 16))) if setup.dry else (MODELS[1], CASES)
    rows = list(linears(model, {key: get_backend(key) for key in usable}, torch.device(setup.device), cases))
    return rows + [{"unavailable": key, "why": reason} for key, (ok, reason) in found.items() if not ok]


def linears(
    model: Model, backends: Mapping[str, Backend], device: torch.device, cases: Sequence[tuple[str, int]]
) -> Iterator[Row]:
    """The four linears of a block in sequence. Their weights together exceed the L2 cache."""
    layers = {}
    for way in (BF16, *backends):
        layers[way] = nn.ModuleList(nn.Linear(K, N, bias=False, dtype=torch.bfloat16, device=device) for _, N, K in model.linears)
        if way != BF16:
            swap_linears(layers[way], backend=way, names=["0", "1", "2", "3"])
    weights = [layer.weight.detach() for layer in layers[BF16]]
    held = {way: [backend.quantize_weight(w, "pow2") for w in weights] for way, backend in backends.items()}
    ours = next((way for way in OURS if way in backends), "")
    for what, M in cases:
        xs, gs = ([torch.randn(M, getattr(linear, side), dtype=torch.bfloat16, device=device) for linear in model.linears]
                  for side in "KN")  # fmt: skip
        calls: dict[str, Callable[[], object]] = {BF16: lambda xs=xs: [F.linear(x, w) for x, w in zip(xs, weights)]}
        for way, backend in backends.items():
            if what == DECODE:
                calls[way] = lambda b=backend, xs=xs, ws=held[way]: [b.fprop(x, w) for x, w in zip(xs, ws)]
            elif what == FPROP:
                qs = [backend.quantize_activation(x, "pow2") for x in xs]
                calls[way] = lambda b=backend, qs=qs, ws=held[way]: [b.gemm(q, w, torch.bfloat16) for q, w in zip(qs, ws)]
        if what == LAYER:
            calls = {way: lambda own=own, xs=xs, gs=gs: _step(own, xs, gs) for way, own in layers.items()}
        times = timed(calls, device)
        for way, (seconds, note) in times.items():
            peak = PUBLISHED.bf16 if way == BF16 else PUBLISHED.fp8
            least = sum(gemm_seconds(M, N, K, way != BF16, peak, PUBLISHED.bandwidth) for _, N, K in model.linears)
            ratio, required = times[BF16][0] / seconds, TARGETS.get((what, M), math.nan) if way == ours else math.nan
            yield {
                "what": what, "M": M, "way": way, "us": seconds * 1e6, "BF16 / this": ratio, "required, at least": required,
                "verdict": "" if math.isnan(required) else "met" if ratio >= required else MISSED,
                "of an H200's published peak": least * (3 if what == LAYER else 1) / seconds, "note": note,
            }  # fmt: skip


def _step(layers: nn.ModuleList, xs: Sequence[Tensor], gs: Sequence[Tensor]) -> None:
    """Forward and backward from new leaves, because layers cache their last quantized input."""
    for layer, x, g in zip(layers, xs, gs, strict=True):
        leaf = x.detach().requires_grad_()
        torch.autograd.grad(layer(leaf), [leaf, layer.weight], g)


def timed(calls: Calls, device: torch.device) -> dict[str, tuple[float, str]]:
    """Seconds of a call, or NaN, with a note. On a CPU: of one call, which measures nothing."""
    return {way: _timed(call, device) for _ in range(2) for way, call in calls.items()}


def _timed(call: Callable[[], object], device: torch.device) -> tuple[float, str]:
    """Raises an error that broke the device, because nothing else can run in this process then."""
    start = time.perf_counter()
    try:
        call()  # compiles kernels and selects algorithms
    except Exception as error:  # an unsupported shape or too little memory is a row
        if device.type == "cuda":
            torch.cuda.synchronize()
        return math.nan, f"{type(error).__name__}: {error}".splitlines()[0][:200]
    if device.type != "cuda":
        return time.perf_counter() - start, ""
    from triton.testing import do_bench, do_bench_cudagraph

    try:
        return do_bench_cudagraph(call, return_mode="median") / 1e3, ""
    except Exception:
        torch.cuda.synchronize()
        return do_bench(call, return_mode="median") / 1e3, "launching included"
