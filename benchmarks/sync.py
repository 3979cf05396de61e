"""A whole weight sync of a model, from a trainer's stream into an engine's memory: part f of ``make hopper``."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

from benchmarks.harness import extra_memory
from jetrl_patch.backends import get_backend
from jetrl_patch.sync.digest import Pieces, Rect
from jetrl_patch.sync.protocol import SCALE_SUFFIX, Terms
from jetrl_patch.sync.receive import Receiver
from jetrl_patch.sync.send import SyncStats, pack, quantized_stream, unpack
from scripts.tables import Row


def shapes_of(parameters: float) -> dict[str, tuple[int, ...]]:
    """A model of about ``parameters`` weights: blocks of seven linear layers, an embedding and its norms."""
    hidden, inner, vocabulary = 2048, 8192, 32_768  # no tensor is larger than half a bucket
    block = {
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (hidden // 4, hidden),
        "self_attn.v_proj": (hidden // 4, hidden), "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    layers = max(1, round((parameters - vocabulary * hidden) / sum(n * k for n, k in block.values())))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for i in range(layers):
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in block.items()}
        shapes[f"model.layers.{i}.input_layernorm.weight"] = (hidden,)
    return shapes


class Memory:
    """An engine that copies what it receives into memory of its own, as a vLLM worker does."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], layers: list[str], device: torch.device) -> None:
        self.layers, self.device = layers, device
        self.tensors: dict[str, torch.Tensor] = {}
        for name, shape in shapes.items():
            quantized = name.removesuffix(".weight") in layers
            dtype = torch.float8_e4m3fn if quantized else torch.bfloat16
            self.tensors[name] = torch.zeros(shape, dtype=dtype, device=device)
            if quantized:
                self.tensors[name + SCALE_SUFFIX] = torch.zeros(-(-shape[0] // 128), -(-shape[1] // 128), device=device)

    def quantized_layers(self) -> list[str]:
        return self.layers

    def to_bf16(self, layers: Any) -> None:
        raise NotImplementedError

    def poison(self) -> None:
        for tensor in self.tensors.values():
            tensor.view(torch.uint8).fill_(0x7F)

    def load(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.tensors[name].copy_(tensor)

    def finish(self) -> None:
        """Nothing to do."""

    def installed(self, plain: Mapping[str, tuple[tuple[int, ...], str]]) -> list[Rect]:
        pieces = Pieces()
        for layer in self.layers:
            for name in (f"{layer}.weight", f"{layer}.weight{SCALE_SUFFIX}"):
                data = self.tensors[name]
                pieces.add(name, 0, data.shape[0], 0, data.shape[1], data)
        return pieces.read()


def sync(weights: dict[str, torch.Tensor], engine: Memory, terms: Terms, overlapped: bool) -> None:
    """One sync. The engine loads in a thread of its own, as a worker runs in a process of its own."""
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    backend = get_backend(terms.backend)
    receiver = Receiver(engine, terms)
    stream = quantized_stream(
        iter(weights.items()), terms=terms, layers=engine.layers, shapes=shapes, stats=SyncStats(),
        quantize=lambda name, weight: backend.quantize_weight(weight, "pow2"),
    )  # fmt: skip
    loading = threading.Thread()
    loading.start()
    for bucket in pack(stream, engine.device):
        loading.join()
        loading = threading.Thread(target=lambda b=bucket: receiver.on_bucket(unpack(b.flat, b.entries)))
        loading.start()
        if not overlapped:
            loading.join()
    loading.join()
    receiver.finish()


def plain(weights: dict[str, torch.Tensor], engine: Memory) -> None:
    """Every weight in BF16, in the same buckets, without a manifest, digests or poison."""
    for bucket in pack(iter(weights.items()), engine.device):
        engine.load(unpack(bucket.flat, bucket.entries))


PLAIN, SERIAL, OVERLAPPED = "plain BF16", "one bucket after the other", "next bucket prepared while one travels"


def model(parameters: float = 1e9, device: str = "cpu", backend: str = "native", turns: int = 2) -> Iterator[Row]:
    """The fastest sync of ``turns``, and the memory that it takes beyond the weights of both sides."""
    shapes = shapes_of(parameters)
    layers = [name.removesuffix(".weight") for name in shapes if "_proj" in name]
    terms = Terms(precision="fp8-unified", align="exact", scale_format="pow2", backend=backend)
    weights = {
        name: torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0, 0.02) for name, shape in shapes.items()
    }
    for way in (PLAIN, SERIAL, OVERLAPPED):
        engine = Memory(shapes, layers if way != PLAIN else [], torch.device(device))
        engine.poison()  # makes its memory resident before anything is measured
        run = partial(plain, weights, engine) if way == PLAIN else partial(sync, weights, engine, terms, way == OVERLAPPED)
        seconds, extra = [], 0
        for _ in range(turns):
            start = time.perf_counter()
            extra = max(extra, extra_memory(run, device))
            seconds.append(time.perf_counter() - start)
        sent = sum(tensor.nbytes for tensor in engine.tensors.values())
        yield {"": way, "GB": sent / 1e9, "seconds": min(seconds), "extra memory, MiB": extra / 2**20}
