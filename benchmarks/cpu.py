"""``make bench``: the CPU's FP8 products compared with torch's, on one thread; the tables of ``docs/benchmarks/cpu.md``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from itertools import cycle

import torch
import torch.nn.functional as F
from torch import Tensor

from jetrl_patch._versions import VERSION
from jetrl_patch.backends import get_backend
from jetrl_patch.native import build, ops
from scripts.tables import Row, markdown, processor

BF16 = torch.bfloat16
#: M, N, K
SHAPES = [(2048, n, n) for n in (512, 1024, 1536)] + [(32, n, n) for n in (512, 1024, 1536)]
SHAPES += [(16, 1024, 1024), (4, 1024, 1024), (1, 512, 512), (1, 1024, 1024), (1, 1536, 1536), (1, 8192, 4096)]
#: with up to this many rows, reading the weight bounds a product
FEW = 16
#: bytes of FP8 weights, more than any cache holds
UNCACHED = 96 << 20


def best_of(functions: Mapping[str, Callable[[], object]], seconds: float = 0.3, rounds: int = 7) -> dict[str, float]:
    """Best seconds per call over ``rounds`` rounds. Each function runs for about ``seconds / rounds`` per round.

    The functions take turns, because a busy machine then slows all of them. Process time of all threads counts; other programs
    do not.
    """
    repeats = {}
    for name, function in functions.items():
        function()
        start = time.process_time()
        function()
        repeats[name] = max(1, int(seconds / rounds / max(time.process_time() - start, 1e-6)))
    best = dict.fromkeys(functions, float("inf"))
    for _ in range(rounds):
        for name, function in functions.items():
            start = time.process_time()
            for _ in range(repeats[name]):
                function()
            best[name] = min(best[name], (time.process_time() - start) / repeats[name])
    return best


def random_weight(N: int, K: int) -> dict[str, Tensor]:
    """A weight [N, K] in each form that a product reads."""
    w, backend = torch.randn(N, K), get_backend("native")
    quantized = backend.quantize_weight(w.to(BF16), "pow2")
    return {"fp32": w, "bf16": w.to(BF16), "q": quantized.q, "s": quantized.s_rows, "packed": backend.pack(quantized)}


def products() -> Iterator[Row]:
    """GFLOP/s of Y = X W^T. "packed" reads the layout that a rollout makes once after a weight sync.

    Decoding reads every weight of a model for each token. So products of few rows take another weight in each call, and the
    weights together exceed the caches.
    """
    backend = get_backend("native")
    for M, N, K in SHAPES:
        weights = [random_weight(N, K) for _ in range(1 if M > FEW else 1 + UNCACHED // (N * K))]
        x = torch.randn(M, K)
        xb = x.to(BF16)
        qx, sx = backend.quantize_activation(xb, "pow2")

        def each(call: Callable[[dict[str, Tensor]], Tensor], weights: list[dict[str, Tensor]] = weights) -> Callable[[], Tensor]:
            turns = cycle(weights)
            return lambda: call(next(turns))

        calls = {
            "torch FP32": each(lambda w, x=x: F.linear(x, w["fp32"])),
            "torch BF16": each(lambda w, x=xb: F.linear(x, w["bf16"])),
            "FP8": each(lambda w, x=qx, s=sx: ops.fp8_gemm(x, s, w["q"], w["s"], BF16)),
            "FP8 packed": each(lambda w, x=qx, s=sx: ops.fp8_gemm(x, s, w["q"], w["s"], BF16, packed=w["packed"])),
            "BF16, exact mode": each(lambda w, x=xb: ops.bf16_gemm(x, w["bf16"], BF16)),
        }
        best = best_of(calls)
        yield {
            "M, N, K": f"{M}, {N}, {K}",
            **{name: 2e-9 * M * N * K / seconds for name, seconds in best.items()},
            "FP8 / torch FP32": best["torch FP32"] / best["FP8"],
            "FP8 / torch BF16": best["torch BF16"] / best["FP8"],
        }


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(f"{processor()}, torch {torch.__version__}, jetrl_patch {VERSION}\n")
    print(markdown(list(products()), f"Products, GFLOP/s: {build.instruction_set()}"))
