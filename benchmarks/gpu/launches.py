"""Decoding: all linears of a block in sequence, from BF16; the Triton backend with one launch per layer and with two."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from benchmarks.gpu.machine import Machine
from benchmarks.gpu.piece import Piece, named
from benchmarks.gpu.shapes import DECODE, MODELS, Model
from benchmarks.gpu.timing import Call, copies
from jetrl_patch.backends import Backend
from jetrl_patch.backends.gpu import TritonBackend
from jetrl_patch.kernels.formats import ScaleFormat

FORMAT: ScaleFormat = "pow2"
#: batch sizes for the one-launch kernel, up to its maximum
ONE_LAUNCH_ROWS = (1, 7, 64)


class OneLaunch(TritonBackend):
    """Quantizes within the product up to the kernel's maximum of rows."""

    def few(self) -> int:
        return 64


class TwoLaunches(TritonBackend):
    """Never quantizes within the product."""

    def few(self) -> int:
        return 0


def one_launch(machine: Machine) -> dict[str, Backend]:
    """The Triton backend with one launch per layer, if Triton is available."""
    return {"triton, one launch": OneLaunch()} if "triton" in machine.backends else {}


def two_launches(machine: Machine) -> dict[str, Backend]:
    """The Triton backend with two launches per layer, if Triton is available."""
    return {"triton, two launches": TwoLaunches()} if "triton" in machine.backends else {}


def decode(machine: Machine, models: Sequence[Model] = MODELS, sizes: Sequence[int] = DECODE) -> Iterator[Piece]:
    """The four linears of a block with quantization: the products of one block in a decoding step."""
    for M in sorted(sizes, key=lambda M: M != 64):  # the target is at 64
        for model in models:
            yield Piece(named(model.name, M), partial(_decode, machine, model, M))


def _decode(machine: Machine, model: Model, M: int) -> Iterator[dict[str, object]]:
    turns = copies(sum(N * K for _, N, K in model.linears), machine.cache)
    weights = [[machine.random(N, K) for _ in range(turns)] for _, N, K in model.linears]
    xs = [machine.random(M, K) for _, _, K in model.linears]
    calls: dict[str, Call] = {"bf16": lambda i: [x @ ws[i % len(ws)].t() for x, ws in zip(xs, weights)]}
    for name, backend in (machine.backends | one_launch(machine) | two_launches(machine)).items():
        if M > 64 and name == "triton, one launch":
            continue
        held = [[backend.quantize_weight(w, FORMAT) for w in ws] for ws in weights]
        calls[name] = lambda i, b=backend, held=held: [
            b.fprop(x, ws[i % len(ws)]) for x, ws in zip(xs, held)
        ]
    times = machine.timer(calls)
    for name, timed in times.items():
        yield {
            "model": model.name, "M": M, "backend": name, "us per block": timed.seconds * 1e6,
            "BF16 / this": times["bf16"].seconds / timed.seconds,
            "note": timed.note,
        }  # fmt: skip
