"""The digest and a whole weight sync on the CPU, beside the formula that they replaced.

``python -m benchmarks.sync digest`` prints GB/s on one thread; ``python -m benchmarks.sync model`` sends a model from a
trainer's stream over buckets into an engine's memory, once with the formula and once with the kernel.
"""

from __future__ import annotations

import functools
import resource
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import torch

from benchmarks.harness import Row, best_of, main
from jetrl_patch.backends import get_backend
from jetrl_patch.sync import digest as digests
from jetrl_patch.sync.digest import Pieces, Rect, formula
from jetrl_patch.sync.protocol import SCALE_SUFFIX, Terms
from jetrl_patch.sync.receive import Receiver
from jetrl_patch.sync.send import BUCKET_BYTES, SyncStats, pack, quantized_stream, unpack

TERMS = Terms(precision="fp8-unified", align="exact", scale_format="pow2", backend="native")
CPU = torch.device("cpu")
#: bytes [rows, columns]: a slice of a row-parallel layer, one expert, a fused layer, an embedding in BF16
SHAPES = ((2048, 2048), (4096, 4096), (8192, 8192), (32768, 4096))


def digest() -> Iterator[Row]:
    """GB/s of the kernel and of the formula in torch, in the same run."""
    torch.set_num_threads(1)
    for rows, cols in SHAPES:
        data = torch.randint(0, 256, (rows, cols), dtype=torch.uint8)
        functions = {"kernel": functools.partial(digests.digest, data), "formula": functools.partial(formula, data)}
        best = best_of(functions, seconds=1.0, rounds=3)
        speed = {f"{name}, GB/s": data.numel() / seconds / 1e9 for name, seconds in best.items()}
        yield {"bytes": f"{rows} x {cols}", **speed, "ratio": best["formula"] / best["kernel"]}


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
    """An engine that keeps what it is sent: bytes of its own, as a vLLM worker does."""

    def __init__(
        self, shapes: dict[str, tuple[int, ...]], layers: list[str], device: torch.device = CPU
    ) -> None:
        self.layers = layers
        self.tensors: dict[str, torch.Tensor] = {}
        for name, shape in shapes.items():
            quantized = name.removesuffix(".weight") in layers
            self.tensors[name] = torch.zeros(
                shape, dtype=torch.float8_e4m3fn if quantized else torch.bfloat16, device=device
            )
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
        """Nothing is left to do."""

    def installed(self, plain: Mapping[str, tuple[tuple[int, ...], str]]) -> list[Rect]:
        pieces = Pieces()
        for layer in self.layers:
            for name in (f"{layer}.weight", f"{layer}.weight{SCALE_SUFFIX}"):
                data = self.tensors[name]
                pieces.add(name, 0, data.shape[0], 0, data.shape[1], data)
        return pieces.read()


def sync(
    weights: dict[str, torch.Tensor], layers: list[str], engine: Memory, overlapped: bool, terms: Terms = TERMS,
    device: torch.device = CPU,
) -> float:  # fmt: skip
    """Seconds of one sync. The engine loads in a thread, as a worker's process does beside the trainer's."""
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    backend = get_backend(terms.backend)
    receiver = Receiver(engine, terms)
    start = time.perf_counter()
    stream = quantized_stream(
        iter(weights.items()), terms=terms, layers=layers, shapes=shapes, stats=SyncStats(),
        quantize=lambda name, weight: backend.quantize_weight(weight, "pow2"),
    )  # fmt: skip
    travelling: threading.Thread | None = None
    for bucket in pack(stream, device):
        if travelling is not None:
            travelling.join()
        travelling = threading.Thread(target=lambda b=bucket: receiver.on_bucket(unpack(b.flat, b.entries)))  # type: ignore[misc]
        travelling.start()
        if not overlapped:
            travelling.join()
    if travelling is not None:
        travelling.join()
    receiver.finish()
    return time.perf_counter() - start


def model(parameters: float = 1e9) -> Iterator[Row]:
    """Seconds and peak extra memory of a sync with the formula and with the kernel, interleaved."""
    shapes = shapes_of(parameters)
    layers = [name.removesuffix(".weight") for name, shape in shapes.items() if "_proj" in name]
    count = sum(torch.Size(shape).numel() for shape in shapes.values())
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator) for name, shape in shapes.items()
    }
    engine = Memory(shapes, layers)
    engine.poison()  # its memory is resident before anything is measured
    seconds: dict[str, list[float]] = {"formula": [], "kernel": [], "kernel, overlapped": []}
    extra: dict[str, int] = {}
    for _ in range(2):
        for name, found in seconds.items():
            before = _resident()
            with Watch() as watch, mock.patch.object(digests, "_native", lambda name=name: name != "formula"):
                found.append(sync(weights, layers, engine, overlapped="overlapped" in name))
            extra[name] = max(extra.get(name, 0), watch.peak - before)
    for name, found in seconds.items():
        yield {
            "digest": name,
            "parameters": float(count),
            "threads": torch.get_num_threads(),
            "seconds": min(found),
            "ratio": min(found) / min(seconds["formula"]),
            "extra MiB": extra[name] >> 20,
            "allowed MiB": (BUCKET_BYTES + max(torch.Size(s).numel() for s in shapes.values()) * 2) >> 20,
        }


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


class Watch:
    """The largest resident memory of this process, looked at every few milliseconds."""

    def __enter__(self) -> Watch:
        self.peak, self._stop = 0, threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._stop.wait(0.005):
            self.peak = max(self.peak, _resident())

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()


if __name__ == "__main__":
    main(digest, model)
