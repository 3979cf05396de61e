"""Part g: a weight sync of eight billion parameters within one GPU. The frameworks' transports are in part e, not here."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.hopper.plan import Setup
from benchmarks.shapes import MODELS
from jetrl_patch.backends import choose_backend, get_backend
from jetrl_patch.sync.digest import Pieces, Rect
from jetrl_patch.sync.protocol import SCALE_SUFFIX, Terms
from jetrl_patch.sync.receive import Receiver
from jetrl_patch.sync.send import SyncStats, pack, quantized_stream, unpack
from scripts.tables import Row

PLAIN, FP8 = "plain BF16", "verified FP8"


def pieces(dry: bool) -> list[str]:
    return [PLAIN, FP8]


def measure(name: str, setup: Setup) -> list[Row]:
    """The fastest of some syncs, and on a GPU the memory that it takes beyond the weights of both sides."""
    blocks, turns, shrunk = (1, 1, 8) if setup.dry else (36, 6, 1)  # the first turn also compiles
    weights = {
        f"{i}.{linear.name}.weight": torch.empty(linear.N // shrunk, linear.K, device=setup.device).normal_(0, 0.02).bfloat16()
        for i in range(blocks) for linear in MODELS[1].linears
    }  # fmt: skip
    engine, seconds = Engine(weights, name == FP8), []
    backend = choose_backend(setup.backend, setup.device)
    terms = Terms(precision="fp8-unified", align="exact", scale_format="pow2", backend=backend)
    before = torch.cuda.memory_allocated()
    if not setup.dry:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(turns):
        start = time.perf_counter()
        sync(weights, engine, terms) if name == FP8 else plain(weights, engine)
        if not setup.dry:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    row = {
        "sync": name, "GB": sum(tensor.nbytes for tensor in engine.tensors.values()) / 1e9, "seconds": min(seconds),
        "extra memory, MiB": "" if setup.dry else (torch.cuda.max_memory_allocated() - before) / 2**20,
    }  # fmt: skip
    base = next((each for each in setup.earlier if each["sync"] == PLAIN), row)
    return [row | {f"{key} / plain": row[key] / base[key] for key in ("GB", "seconds")}]


class Engine:
    """An engine that copies what it receives into memory of its own, as a vLLM worker does."""

    def __init__(self, weights: Mapping[str, Tensor], fp8: bool) -> None:
        self.layers = [name.removesuffix(".weight") for name in weights] if fp8 else []
        self.device = next(iter(weights.values())).device
        self.tensors = {name: torch.zeros_like(w, dtype=torch.float8_e4m3fn if fp8 else w.dtype) for name, w in weights.items()}
        if fp8:
            shapes = {name + SCALE_SUFFIX: [-(-n // 128) for n in w.shape] for name, w in weights.items()}
            self.tensors |= {name: torch.zeros(shape, device=self.device) for name, shape in shapes.items()}

    def quantized_layers(self) -> list[str]:
        return self.layers

    def to_bf16(self, layers: Any) -> None:
        raise NotImplementedError

    def poison(self) -> None:
        for tensor in self.tensors.values():
            tensor.view(torch.uint8).fill_(0x7F)

    def load(self, weights: list[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            self.tensors[name].copy_(tensor)

    def finish(self) -> None:
        """Nothing to do."""

    def installed(self, plain: Any) -> list[Rect]:
        found = Pieces()
        for name, data in self.tensors.items():
            found.add(name, 0, data.shape[0], 0, data.shape[1], data)
        return found.read()


def sync(weights: dict[str, Tensor], engine: Engine, terms: Terms) -> None:
    """Quantize, send, poison, load and compare digests."""
    receiver, shapes = Receiver(engine, terms), {name: tuple(w.shape) for name, w in weights.items()}
    quantize = lambda name, weight: get_backend(terms.backend).quantize_weight(weight, "pow2")  # noqa: E731
    names = {"terms": terms, "layers": engine.layers, "shapes": shapes, "stats": SyncStats(), "quantize": quantize}
    for bucket in pack(quantized_stream(iter(weights.items()), **names), engine.device):
        receiver.on_bucket(unpack(bucket.flat, bucket.entries))
    receiver.finish()


def plain(weights: dict[str, Tensor], engine: Engine) -> None:
    """Every weight in BF16, in the same buckets, without a manifest, digests or poison."""
    for bucket in pack(iter(weights.items()), engine.device):
        engine.load(unpack(bucket.flat, bucket.entries))
