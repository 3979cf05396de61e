"""Part f: a weight sync of an 8B shape within one GPU: bytes, seconds, and memory beyond the weights of both sides.

The stream is packed into buckets and unpacked into an engine's memory. The transports of the frameworks are left out here:
part g has them. Plain BF16 travels through the same buckets, without a manifest, digests or poison.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks.harness import Row
from benchmarks.hopper import shape
from benchmarks.hopper.record import Record, Table
from benchmarks.hopper.worker import Piece, Setup
from benchmarks.sync import Memory, sync
from jetrl_patch.backends import choose_backend
from jetrl_patch.sync.protocol import Terms
from jetrl_patch.sync.send import pack, unpack

PLAIN, FP8 = "plain BF16", "fp8-unified"
ROUNDS = 5


def pieces(setup: Setup) -> Iterator[Piece]:
    for name in (PLAIN, FP8):
        yield Piece("Syncs", name, partial(_run, setup, name), 90)


def _run(setup: Setup, name: str) -> list[Row]:
    device = torch.device(setup.device)
    cuda = device.type == "cuda"
    weights = dict(shape.build(shape.config(shape.LAYERS, setup.dry), setup.device).state_dict())
    shapes = {key: tuple(weight.shape) for key, weight in weights.items()}
    layers = [key.removesuffix(".weight") for key in shapes if "_proj" in key] if name == FP8 else []
    engine = Memory(shapes, layers, device)
    run: Callable[[], object] = partial(plain, weights, engine, device)
    if name == FP8:
        terms = Terms(
            precision=FP8, align="exact", scale_format="pow2", backend=choose_backend(setup.backend, setup.device)
        )
        run = partial(sync, weights, layers, engine, True, terms, device)
    seconds, extra = [], 0
    for _ in range(1 + (1 if setup.dry else ROUNDS)):
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        start = time.perf_counter()
        run()
        if cuda:
            torch.cuda.synchronize()
            extra = max(extra, torch.cuda.max_memory_allocated() - before)
        seconds.append(time.perf_counter() - start)
    sent, median = sum(tensor.nbytes for tensor in engine.tensors.values()), statistics.median(seconds[1:])
    return [
        {
            "sync": name, "parameters": float(sum(w.numel() for w in weights.values())), "GB": sent / 1e9, "seconds": median,
            "slowest": max(seconds[1:]), "GB/s": sent / 1e9 / median, "extra MiB": extra / 2**20 if cuda else "",
        }
    ]  # fmt: skip


def plain(weights: dict[str, torch.Tensor], engine: Memory, device: torch.device) -> None:
    """Every weight in BF16, in buckets."""
    for bucket in pack(iter(weights.items()), device):
        engine.load(unpack(bucket.flat, bucket.entries))


def derive(record: Record) -> list[Table]:
    if not {PLAIN, FP8} <= set(record.rows):
        return []
    base, ours = record.rows[PLAIN][0], record.rows[FP8][0]
    ratios = {f"{key}, FP8 / BF16": ours[key] / base[key] for key in ("GB", "seconds", "extra MiB") if base[key]}
    return [("FP8 against plain BF16", [ratios], "")]
