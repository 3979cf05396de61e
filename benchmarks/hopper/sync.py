"""Part f: a weight sync of an 8B shape within one GPU: bytes, seconds, and memory beyond the weights of both sides.

The stream is packed into buckets and unpacked into an engine's memory. The transports of the frameworks are left out here:
part g has them. Plain BF16 travels through the same buckets, without a manifest, digests or poison.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.hopper import shape
from benchmarks.hopper.cells import Cell, Cells, Derived, Setup, ratio, whole
from benchmarks.sync import Memory, sync
from jetrl_patch.backends import choose_backend
from jetrl_patch.sync.protocol import Terms
from jetrl_patch.sync.send import pack, unpack

PLAIN, FP8 = "plain BF16", "fp8-unified"
ROUNDS = 5


def cells(setup: Setup) -> dict[str, Cell]:
    return {name: Cell("Syncs", whole(partial(_run, setup, name)), 90) for name in (PLAIN, FP8)}


def _run(setup: Setup, name: str) -> Iterator[dict[str, Any]]:
    device = torch.device(setup.device)
    shapes = shape.shapes(shape.config(shape.LAYERS, setup.dry))
    torch.manual_seed(0)
    weights = {key: shape.weight(size, setup.device) for key, size in shapes.items()}
    layers = [key.removesuffix(".weight") for key in shapes if "_proj" in key] if name == FP8 else []
    engine = Memory(shapes, layers, device)
    if name == FP8:
        backend = choose_backend(setup.backend, setup.device)
        terms = Terms(precision=FP8, align="exact", scale_format="pow2", backend=backend)
        run: Callable[[], object] = lambda: sync(weights, layers, engine, True, terms, device)  # noqa: E731
    else:
        run = lambda: plain(weights, engine, device)  # noqa: E731
    seconds, extra = [], 0
    for _ in range(1 + (1 if setup.dry else ROUNDS)):
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
            extra = max(extra, torch.cuda.max_memory_allocated() - before)
        seconds.append(time.perf_counter() - start)
    sent, median = sum(tensor.nbytes for tensor in engine.tensors.values()), statistics.median(seconds[1:])
    yield {
        "sync": name, "parameters": float(sum(w.numel() for w in weights.values())), "GB": sent / 1e9, "seconds": median,
        "slowest": max(seconds[1:]), "GB/s": sent / 1e9 / median, "extra MiB": extra / 2**20 if device.type == "cuda" else "",
    }  # fmt: skip


def plain(weights: dict[str, torch.Tensor], engine: Memory, device: torch.device) -> None:
    """Every weight in BF16, in buckets."""
    for bucket in pack(iter(weights.items()), device):
        engine.load(unpack(bucket.flat, bucket.entries))


def derive(cells: Cells, planned: Sequence[str]) -> list[Derived]:
    rows = {row["sync"]: row for found in cells.values() for row in found}
    if not {PLAIN, FP8} <= set(rows):
        return []
    ratios = {f"{key}, FP8 / BF16": ratio(rows[FP8][key], rows[PLAIN][key]) for key in ("GB", "seconds", "extra MiB")}
    return [Derived("FP8 against plain BF16", [ratios])]
