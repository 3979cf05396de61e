"""Lower bounds for the time of a layer's linears, from arithmetic and bytes alone; needs no GPU.

    t = max(2 M N K / P, bytes / B);  bytes: FP8 MK + NK + 2MN, BF16 2 (MK + NK + MN)

The quantization of a training step moves, in bytes per element (without scales, 1/32 of a byte per write):

| what                      | separate             | one read, two layouts | fused into the producer |
| activation, 1x128         | 2 read + 1 written   | the same              | 1 written               |
| saved activation to 128x1 | 1 read + 1 written   | the same              | the same                |
| output gradient           | 2 x (2 + 1)          | 2 read + 2 written    | 2 written               |
| weight, once a step       | 2 read + 1 written   | the same              | the same                |
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.gpu.shapes import DECODE, MODELS, Model

WAYS = ("separate", "one read", "fused")


class Peaks(NamedTuple):
    """Arithmetic in TFLOP/s for BF16 and FP8 GEMMs, and memory bandwidth in GB/s, reads plus writes."""

    bf16: float
    fp8: float
    fp8_wgrad: float
    bandwidth: float


#: an H200: BF16 as measured elsewhere with cuBLAS, FP8 from NVIDIA's datasheet, copies as measured elsewhere
H200 = Peaks(bf16=790.0, fp8=1979.0, fp8_wgrad=1979.0, bandwidth=4300.0)
#: the same, with published FP8 kernel results on Hopper
PUBLISHED = H200._replace(fp8=1250.0, fp8_wgrad=1000.0)


def gemm_seconds(M: int, N: int, K: int, fp8: bool, peak: float, bandwidth: float) -> float:
    """The lower bound for one product with BF16 output."""
    size = M * K + N * K + 2 * M * N if fp8 else 2 * (M * K + N * K + M * N)
    return max(2 * M * N * K / (peak * 1e12), size / (bandwidth * 1e9))


def training_ms(model: Model, M: int, fp8: bool, peaks: Peaks) -> float:
    """FProp, DGrad and WGrad of all linears of one layer, without quantization."""
    seconds = 0.0
    for _, N, K in model.linears:
        peak, wgrad = (peaks.fp8, peaks.fp8_wgrad) if fp8 else (peaks.bf16, peaks.bf16)
        seconds += gemm_seconds(M, N, K, fp8, peak, peaks.bandwidth) + gemm_seconds(M, K, N, fp8, peak, peaks.bandwidth)
        seconds += gemm_seconds(N, K, M, fp8, wgrad, peaks.bandwidth)
    return seconds * 1e3


def quantization_ms(model: Model, M: int, way: str, peaks: Peaks) -> float:
    """Time to move the bytes of one training step's quantization, in one of ``WAYS``."""
    activation = {"separate": 3, "one read": 3, "fused": 1}[way] + 2
    gradient = {"separate": 6, "one read": 4, "fused": 2}[way]
    size = sum(M * K * activation + M * N * gradient + 3 * N * K for _, N, K in model.linears)
    return size / (peaks.bandwidth * 1e9) * 1e3


def decode_speedup(model: Model, M: int, peaks: Peaks) -> float:
    """BF16 time over FP8 time for all linears of one layer at M rows, without quantization."""
    times = {
        fp8: sum(gemm_seconds(M, N, K, fp8, peaks.fp8 if fp8 else peaks.bf16, peaks.bandwidth) for _, N, K in model.linears)
        for fp8 in (False, True)
    }
    return times[False] / times[True]


def floors(peaks: Peaks = PUBLISHED, M: int = 16384) -> Iterator[dict[str, object]]:
    """One row per model: the lower bounds for a layer's training step, and the largest possible decoding speedup."""
    for model in MODELS:
        bf16, fp8 = (training_ms(model, M, kind, peaks) for kind in (False, True))
        row: dict[str, object] = {"model": model.name, "M": M, "BF16 ms": bf16, "FP8 ms": fp8}
        for way in WAYS:
            quantization = quantization_ms(model, M, way, peaks)
            row[f"quantization ms, {way}"] = quantization
            row[f"speedup, {way}"] = bf16 / (fp8 + quantization)
        for rows in DECODE:
            row[f"decode speedup, M={rows}"] = decode_speedup(model, rows, peaks)
        yield row
