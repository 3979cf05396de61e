"""The time of one RL step: rollout, old log-probs, update. The formulas are on the page."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from benchmarks.cost.parts import ATTENTION, DECODED, ELEMENTWISE, LATENCY, QUANTIZED, ROOM, Gpu, Net, Way
from benchmarks.gpu.floors import gemm_seconds

#: tokens between two looks at who has ended
STRIDE = 64


class Step(NamedTuple):
    """Seconds of a step's phases, and the tensor parallelism of its rollout."""

    rollout: float
    old_log_probs: float
    update: float
    tp: int

    @property
    def whole(self) -> float:
        return self.rollout + self.old_log_probs + self.update


class Load(NamedTuple):
    """What a step works on: samples, prompt tokens of each, and the longest response."""

    samples: int
    prompt: int
    longest: int

    def responses(self) -> np.ndarray:
        """Lengths: quantiles of an exponential distribution with a quarter of the longest as mean, cut off at the longest."""
        at = (np.arange(self.samples) + 0.5) / self.samples
        lengths = np.minimum(-np.log1p(-at) * self.longest / 4, self.longest)
        return np.random.default_rng(0).permutation(np.maximum(lengths, 1).astype(int))


def step(net: Net, way: Way, load: Load, gpu: Gpu) -> Step:
    """The phases of one step on ``8 * net.nodes`` GPUs, one after the other, each mode with its best tensor parallelism.

    Raises:
        ValueError: the model leaves no room for a KV cache with any.
    """
    gpus = 8 * net.nodes
    lengths = load.responses() + load.prompt
    forward = training_forward(net, way, lengths, gpu) / gpus
    backward = training_backward(net, way, lengths, gpu) / gpus
    seconds, tp = min((rollout(net, way, load, gpu, tp), tp) for tp in net.sizes(way.samples))
    if seconds == float("inf"):
        raise ValueError(f"{net.block.name} leaves no room for a KV cache")
    return Step(seconds, way.passes * forward, 2 * forward + backward, tp)  # the update's forward runs twice: checkpointing


@functools.cache
def rollout(net: Net, way: Way, load: Load, gpu: Gpu, tp: int) -> float:
    """Seconds of the slowest replica; infinite if the weights leave no room."""
    replicas = 8 * net.nodes // tp
    return max(decoding(net, way, load.responses()[i::replicas], load.prompt, gpu, tp) for i in range(min(replicas, 2)))


def training_forward(net: Net, way: Way, lengths: np.ndarray, gpu: Gpu) -> float:
    """GPU seconds of a forward pass over all sequences."""
    tokens, peaks = float(lengths.sum()), gpu.peaks
    peak = (peaks.fp8 if way.trains else peaks.bf16) * 1e12
    found = 2 * tokens * _active(net) / peak
    if way.trains:
        found += tokens * _inputs(net) * QUANTIZED[0] / (peaks.bandwidth * 1e9)
    return found + _rest(net, way, lengths, gpu)


def training_backward(net: Net, way: Way, lengths: np.ndarray, gpu: Gpu) -> float:
    """GPU seconds of DGrad, WGrad and the backward of everything else."""
    tokens, peaks = float(lengths.sum()), gpu.peaks
    dgrad, wgrad = (peaks.fp8, peaks.fp8_wgrad) if way.trains else (peaks.bf16, peaks.bf16)
    found = 2 * tokens * _active(net) * (1 / dgrad + 1 / wgrad) / 1e12
    if way.trains:
        found += tokens * _outputs(net) * QUANTIZED[1] / (peaks.bandwidth * 1e9)
    return found + 2.25 * _rest(net, way, lengths, gpu)


def decoding(net: Net, way: Way, responses: np.ndarray, prompt: int, gpu: Gpu, tp: int) -> float:
    """Seconds in which one replica of the rollout answers its prompts, as many at a time as its KV cache holds.

    Infinite if it does not hold one of the longest.
    """
    size = net.matrices * (1 if way.samples else 2) + 4 * net.vocabulary * net.block.hidden
    per_token = 4.0 * net.layers * net.block.kv_heads * net.block.head_dim
    room = (gpu.memory * ROOM * tp - size) / per_token
    if room < prompt + responses.max() + STRIDE:
        return float("inf")
    waiting, running, seconds = list(responses[::-1]), np.zeros((0, 2)), 0.0  # done, wanted
    while len(waiting) or len(running):
        held = running[:, 0].sum() + len(running) * (prompt + STRIDE)
        while waiting and held + prompt + STRIDE <= room:
            running = np.vstack([running, [0, waiting.pop()]])
            held += prompt + STRIDE
        seconds += STRIDE * one_token(net, way, len(running), held, gpu, tp)
        running[:, 0] += STRIDE
        running = running[running[:, 0] < running[:, 1]]
    return seconds


def one_token(net: Net, way: Way, rows: int, context: float, gpu: Gpu, tp: int) -> float:
    """Seconds of one decoding step of ``rows`` sequences that hold ``context`` tokens together."""
    peaks = gpu.peaks
    peak = peaks.fp8 if way.samples else peaks.bf16
    linears = 0.0
    for linear in net.block.linears:
        dense = linear.name in ("qkv", "o") or net.experts == 1
        if dense:
            linears += gemm_seconds(rows, linear.N // tp, linear.K, way.samples, peak, peaks.bandwidth)
        else:
            used = net.experts * (1 - (1 - net.active / net.experts) ** rows)
            size = used * linear.N * linear.K * (1 if way.samples else 2) / tp
            work = 2 * rows * net.active * linear.N * linear.K / tp
            linears += max(size / (peaks.bandwidth * 1e9), work / (peak * 1e12))
    if way.samples:
        linears /= DECODED
    cache = context * 4 * net.block.kv_heads * net.block.head_dim / tp / (peaks.bandwidth * 1e9) / way.decoding
    shared = 2 * sum_over_ranks(rows * net.block.hidden, way.gathers, gpu, tp)
    head = gemm_seconds(rows, net.vocabulary // tp, net.block.hidden, False, peaks.bf16, peaks.bandwidth)
    return net.layers * (linears + cache + shared) + head


def sum_over_ranks(elements: float, gathers: bool, gpu: Gpu, tp: int) -> float:
    """Seconds of the sum behind a row-parallel linear.

    A BF16 all-reduce sends and receives 2 (tp - 1) / tp elements of two bytes; exact mode gathers the FP32 sums of all other
    ranks, and reads them again to add them in rank order. (Added in one shot, they are read from the peers: as many bytes.)
    """
    if tp == 1:
        return 0.0
    size = 4 * elements * (tp - 1) / tp
    if not gathers:
        return LATENCY + size / gpu.link
    return LATENCY + gathered(tp) * size / gpu.link + 4 * elements * tp / (gpu.peaks.bandwidth * 1e9)


def gathered(tp: int) -> float:
    """Bytes that a rank receives in a gather of FP32 sums, over those of a BF16 all-reduce."""
    return float(tp)


def _active(net: Net) -> float:
    attention, mlp = net.weights()
    return net.layers * (attention + net.active * mlp)


def _inputs(net: Net) -> float:
    return net.layers * sum(linear.K * _copies(net, linear.name) for linear in net.block.linears)


def _outputs(net: Net) -> float:
    return net.layers * sum(linear.N * _copies(net, linear.name) for linear in net.block.linears)


def _copies(net: Net, name: str) -> int:
    return 1 if name in ("qkv", "o") else net.active


def _rest(net: Net, way: Way, lengths: np.ndarray, gpu: Gpu) -> float:
    """Attention, ``lm_head`` and what moves bytes alone, in a forward pass: GPU seconds."""
    squares, tokens = float((lengths.astype(float) ** 2).sum()), float(lengths.sum())
    products = 2 * squares * net.block.heads * net.block.head_dim * net.layers  # causal: half of 4 c^2 d
    moved = net.layers * (ELEMENTWISE[0] * net.block.hidden + ELEMENTWISE[1] * net.active * net.block.intermediate)
    attention = products / (ATTENTION * way.attention * gpu.peaks.bf16 * 1e12)
    head = 2 * tokens * net.vocabulary * net.block.hidden / (gpu.peaks.bf16 * 1e12)
    return attention + head + tokens * moved / (gpu.peaks.bandwidth * 1e9)


def table(nets: tuple[Net, ...], ways: tuple[Way, ...], loads: tuple[Load, ...], gpu: Gpu) -> Iterator[dict[str, object]]:
    """One row per model and length: the BF16 step in seconds, its shares, and how much faster each other mode is."""
    for net in nets:
        for load in loads:
            steps = {way.name: step(net, way, load, gpu) for way in ways}
            base = steps[ways[0].name]
            row: dict[str, object] = {"model": net.block.name, "GPUs": 8 * net.nodes, "longest": load.longest}
            row |= {"BF16 step, s": f"{base.whole:.0f} ({base.tp})", "rollout": f"{base.rollout / base.whole:.0%}"}
            row |= {"old log-probs": f"{base.old_log_probs / base.whole:.0%}"}
            row |= {way.name: f"{base.whole / steps[way.name].whole:.2f} ({steps[way.name].tp})" for way in ways[1:]}
            yield row
