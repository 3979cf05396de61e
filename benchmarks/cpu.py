"""``make bench``: the CPU's FP8 products compared with torch's, under each instruction set of this processor.

Each set is measured in a process of its own, which also restricts torch to that set where torch allows it. ``--write`` writes
``docs/benchmarks/cpu.md``.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from jetrl_patch._versions import VERSION
from jetrl_patch.backends import get_backend
from jetrl_patch.native import build, ops
from scripts.tables import Row, markdown, processor

#: instruction set -> variables that restrict torch and oneDNN to it. MKL, which torch's FP32 products use, ignores them on AMD
TORCH = {
    "avx512_bf16": {},
    "avx512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "portable": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"},
}
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


@dataclass(frozen=True)
class Weight:
    """One weight [N, K] in each form that a product reads."""

    fp32: Tensor
    bf16: Tensor
    q: Tensor
    s: Tensor
    packed: Tensor

    @classmethod
    def random(cls, N: int, K: int) -> Weight:
        w, backend = torch.randn(N, K), get_backend("native")
        quantized = backend.quantize_weight(w.to(BF16), "pow2")
        return cls(w, w.to(BF16), quantized.q, quantized.s_rows, backend.pack(quantized))


def products() -> Iterator[Row]:
    """GFLOP/s of Y = X W^T. "packed" reads the layout that a rollout makes once after a weight sync.

    Decoding reads every weight of a model for each token. So products of few rows take another weight in each call, and the
    weights together exceed the caches. "What the bytes allow" is the time torch's FP32 product of one row takes per byte.
    """
    backend = get_backend("native")
    for M, N, K in SHAPES:
        weights = [Weight.random(N, K) for _ in range(1 if M > FEW else 1 + UNCACHED // (N * K))]
        x = torch.randn(M, K)
        xb, row = x.to(BF16), x[:1].contiguous()
        qx, sx = backend.quantize_activation(xb, "pow2")

        def each(call: Callable[[Weight], Tensor], weights: list[Weight] = weights) -> Callable[[], Tensor]:
            turns = cycle(weights)
            return lambda: call(next(turns))

        best = best_of(
            {
                "torch FP32": each(lambda w, x=x: F.linear(x, w.fp32)),
                "torch BF16": each(lambda w, x=xb: F.linear(x, w.bf16)),
                "FP8": each(lambda w, x=qx, s=sx: ops.fp8_gemm(x, s, w.q, w.s, BF16)),
                "FP8 packed": each(lambda w, x=qx, s=sx: ops.fp8_gemm(x, s, w.q, w.s, BF16, packed=w.packed)),
                "BF16, exact mode": each(lambda w, x=xb: ops.bf16_gemm(x, w.bf16, BF16)),
                "one row": each(lambda w, x=row: F.linear(x, w.fp32)),
            }
        )
        bytes_allow = best.pop("one row") / torch.float32.itemsize
        yield {
            "M, N, K": f"{M}, {N}, {K}",
            **{name: 2e-9 * M * N * K / seconds for name, seconds in best.items()},
            "FP8 / torch FP32": best["torch FP32"] / best["FP8"],
            "FP8 / torch BF16": best["torch BF16"] / best["FP8"],
            "packed, of what the bytes allow": f"{bytes_allow / best['FP8 packed']:.0%}" if M <= FEW else "",
        }


def measured() -> list[Row]:
    """The rows, on one thread."""
    torch.set_num_threads(1)
    return list(products())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu", description=__doc__)
    sets = [name for name in build.supported() if name != "portable"] or ["portable"]
    parser.add_argument("--isa", choices=build.supported(), action="append", default=[], help=f"by default {', '.join(sets)}")
    parser.add_argument("--write", type=Path, help="also write the tables to this file")
    args = parser.parse_args()
    page = (
        f"# Speed on the CPU\n\nOne thread of {processor()}, torch {torch.__version__}, jetrl_patch {VERSION}. "
        "Process time, best of interleaved rounds, for each instruction set of this processor; torch is limited to the same "
        "set. As in decoding, products of up to 16 rows read a different weight in each call, and the weights exceed the "
        "caches. Command: `make bench ARGS='--write docs/benchmarks/cpu.md'`.\n"
    )
    for isa in args.isa or sets:
        restricted = mock.patch.dict(os.environ, TORCH[isa] | {"JETRL_CPU_ISA": isa})
        with restricted, ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            table = markdown(pool.submit(measured).result(), f"Products, GFLOP/s: {isa}")
        print(table)
        page += "\n" + table
    if args.write:
        args.write.write_text(page)


if __name__ == "__main__":
    main()
