"""The parts of the cost model that ``make hopper`` has measured, from its records."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks.cost import EIGHT, FP8_CACHE, WAYS, Gpu, one_token
from benchmarks.hopper import kernels, plan, training
from benchmarks.hopper.plan import find
from benchmarks.hopper.record import load, rows_of
from benchmarks.shapes import gemm_seconds
from scripts.tables import Row

MODEL, NET = EIGHT.block, EIGHT
M = 16384
#: bytes per element that quantization moves in a linear layer alone: an input is read and written for FProp (2 + 1), and its
#: saved copy for WGrad (1 + 1); a gradient is read once and written in two layouts (2 + 2)
READ = (5, 4)


def measured(folder: Path, gpu: Gpu) -> dict[str, float]:
    """Parts of ``gpu`` by name, in its units, from the records in ``folder``. Dry runs and failed pieces give none.

    Its memory and links are not measured: shares of what bytes allow refer to the bandwidth that is assumed.
    """
    found: dict[str, float] = {}
    for name, parts in (("kernels", _products), ("training", _attention), ("rollout", _decoding)):
        record = load(folder, find([name])[0])
        rows = [] if record["dry"] else rows_of(record)
        for part, value in parts(rows, gpu.with_parts(found)):
            if value > 0:  # not NaN, nor less than what it contains
                found[part] = value
    return found


def _products(rows: list[Row], gpu: Gpu) -> Iterator[tuple[str, float]]:
    """Peaks of GEMMs, and FP8 decoding, with the backend that ``auto`` picks."""
    seconds = {(row["what"], row["M"], row["way"]): 1e-6 * row["us"] for row in rows if "us" in row}
    flops = 2 * M * sum(N * K for _, N, K in MODEL.linears) / 1e12
    if bf16 := seconds.get((kernels.FPROP, M, kernels.BF16)):
        yield "bf16", flops / bf16
    for way in kernels.OURS:
        if not (fprop := seconds.get((kernels.FPROP, M, way))):
            continue
        yield "fp8", flops / fprop
        if both := seconds.get((kernels.LAYER, M, way)):  # without FProp, DGrad and the quantization of inputs and gradients
            moved = M * sum(READ[0] * K + READ[1] * N for _, N, K in MODEL.linears)
            yield "fp8_wgrad", flops / (both - 2 * fprop - moved / (gpu.peaks.bandwidth * 1e9))
        if decoded := seconds.get((kernels.DECODE, 64, way)):
            least = (gemm_seconds(64, N, K, True, flops / fprop, gpu.peaks.bandwidth) for _, N, K in MODEL.linears)
            yield "fp8_decoding", sum(least) / decoded
        return


def _attention(rows: list[Row], gpu: Gpu) -> Iterator[tuple[str, float]]:
    """Attention in training: what a forward pass takes longer if the same tokens are one sequence."""
    (few, length), (_, whole) = training.VARIANTS["short"], training.VARIANTS["long"]
    pairs = 2 * (whole**2 - few * length**2) * MODEL.heads * MODEL.head_dim * training.LAYERS
    seconds = {(row["mode"], row["sequences"]): row["forward ms"] / 1e3 for row in rows}

    def share(mode: str) -> float:
        longer = seconds.get((mode, "long"), float("nan")) - seconds.get((mode, "short"), float("nan"))
        return pairs / longer / (gpu.peaks.bf16 * 1e12)

    yield "attention", share(training.BASELINE)
    yield "exact_attention", share("exact") / share(training.BASELINE)


def _decoding(rows: list[Row], gpu: Gpu) -> Iterator[tuple[str, float]]:
    """Decoding of few long contexts, without what the linears and the head take in the model."""
    way = WAYS[-1]
    for part, mode, size in (("exact_decoding", plan.GRAPHS, 2.0), ("cache_decoding", plan.FP8_CACHE, FP8_CACHE)):
        for row in rows:
            if (row["mode"], row["requests"], row["prompt"]) == (mode, 4, 32768):
                context = row["requests"] * (row["prompt"] + row["response"] / 2)
                least = context * 2 * size * MODEL.kv_heads * MODEL.head_dim * NET.layers / (gpu.peaks.bandwidth * 1e9)
                yield part, least / (row["requests"] / row["decode tokens/s"] - one_token(NET, way, row["requests"], 0, gpu, 1))
