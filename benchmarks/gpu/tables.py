"""The tables of the kernels, and each on tiny shapes that a CPU computes in a moment."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch

from benchmarks.gpu import attention, block, head, launches, parts
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.piece import Piece
from benchmarks.gpu.shapes import Model
from benchmarks.gpu.timing import Call, Timed, told
from jetrl_patch.backends import get_backend

Run = Callable[[Machine], Iterator[Piece]]
TINY = (Model("tiny", hidden=128, intermediate=256, heads=2, kv_heads=1, head_dim=64),)


class Table(NamedTuple):
    """A table's title, how it is measured, its seconds of a run, after which no piece is begun, and ``run`` on tiny shapes."""

    title: str
    run: Run
    seconds: float
    tiny: Run


#: by name, in the order of a run: first what the targets need
TABLES = {
    "rows": Table(
        "Batch invariance: backends that may serve a rollout", parts.rows, 60, lambda m: parts.rows(m, TINY, 300)
    ),
    "fused": Table(
        "Rows of fused and tensor-parallel weights against the trainer's", parts.fused, 90,
        lambda m: parts.fused(m, TINY, (1,), 130),
    ),
    "layers": Table("A linear layer, forward and backward", parts.layers, 90, lambda m: parts.layers(m, TINY, (256,))),
    "products": Table("FProp, quantized operands", parts.products, 130, lambda m: parts.products(m, TINY, (1, 16))),
    "decode": Table(
        "Decoding: the linears of a block, including quantization", launches.decode, 50,
        lambda m: launches.decode(m, TINY, (1, 16)),
    ),
    "quantizers": Table("Quantizers vs. a copy", parts.quantizers, 50, lambda m: parts.quantizers(m, ((16, 128),))),
    "blocks": Table(
        "A block without attention, forward and backward", block.blocks, 60, lambda m: block.blocks(m, TINY, 256)
    ),
    "attention": Table(
        "Attention: training, and decoding over long contexts", attention.attention, 80,
        lambda m: attention.attention(m, TINY, ((2, 16),), (2,), (32,)),
    ),
    "head": Table("lm_head and log-probs", head.head, 50, lambda m: head.head(m, TINY, (2,), 16, 64)),
    "gradients": Table(
        "DGrad and WGrad, including quantization", parts.gradients, 80, lambda m: parts.gradients(m, TINY, (16,))
    ),
    "profile": Table("Kernels of a block's step", block.profiles, 20, lambda m: block.profiles(m, TINY, 256)),
}  # fmt: skip


def wall_clock(calls: Mapping[str, Call]) -> dict[str, Timed]:
    """The interface of ``CudaTimer`` on a CPU: two calls each, which is no measurement."""
    found = {}
    for name, call in calls.items():
        try:
            start = time.perf_counter()
            call(0), call(1)
            found[name] = Timed((time.perf_counter() - start) / 2, True)
        except Exception as error:
            found[name] = Timed(math.nan, False, told(error))
    return found


def tiny_machine() -> Machine:
    """A CPU with two backends, for tables of tiny shapes. Nothing is compiled: torch.compile's "eager" only traces."""
    both = {name: get_backend(name) for name in ("torch", "native")}
    return Machine(torch.device("cpu"), wall_clock, both, {"te": "not installed"}, cache=1000, side=64, compiler="eager")
