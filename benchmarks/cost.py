"""What a step of RL costs on Hopper GPUs, from arithmetic. ``benchmarks.scaling`` writes the page."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from benchmarks.counted.__main__ import moved
from benchmarks.shapes import MODELS, PUBLISHED, RANKS, Linear, Model, Peaks, gemm_seconds
from jetrl_patch.kernels.formats import BLOCK

# ---- Assumptions: a measurement replaces its part ---------------------------------------------------


class Gpu(NamedTuple):
    """A GPU and what kernels reach on it.

    Attributes:
        memory, room: bytes, and the share of them for the rollout's weights and KV cache.
        link, latency: bytes per second and direction to its neighbors, and fixed seconds of a collective.
        attention: speed of FlashAttention-3 in training, as a share of the BF16 peak of GEMMs.
        exact_attention: speed of exact attention in training, relative to it.
        exact_decoding, cache_decoding: speed of exact decoding from a BF16 and an FP8 KV cache, as a share of what bytes allow.
        fp8_decoding: the same for FP8 linears in decoding with the quantization of their inputs.
    """

    peaks: Peaks
    memory: float
    link: float
    room: float = 0.85
    latency: float = 10e-6
    attention: float = 0.75
    exact_attention: float = 0.5
    exact_decoding: float = 0.85
    cache_decoding: float = 0.7
    fp8_decoding: float = 0.85

    def part(self, name: str) -> float:
        """A part by its name, also one of the peaks."""
        found: float = getattr(self.peaks if name in Peaks._fields else self, name)
        return found

    def with_parts(self, parts: Mapping[str, float]) -> Gpu:
        """With other values of these parts. Raises ValueError for a name that is no part."""
        peaks = {name: value for name, value in parts.items() if name in Peaks._fields}
        return self._replace(peaks=self.peaks._replace(**peaks), **{k: v for k, v in parts.items() if k not in peaks})


#: an H100 has an H200's arithmetic, and 3.35 of its 4.8 TB/s
H100 = Gpu(PUBLISHED._replace(bandwidth=PUBLISHED.bandwidth * 3.35 / 4.8), 80e9, 450e9)


class Net(NamedTuple):
    """A whole model on ``nodes`` of eight GPUs. A token uses ``active`` of a block's ``experts``; a dense model has one."""

    block: Model
    layers: int
    vocabulary: int
    nodes: int = 1
    experts: int = 1
    active: int = 1

    def times(self, linear: Linear, experts: int) -> int:
        """How often a block with so many experts has this linear layer. ``active`` is how often a token uses it."""
        return 1 if linear.name in ("qkv", "o") else experts

    def matrices(self, experts: int) -> float:
        """Parameters of the quantized linear layers with so many experts."""
        return self.layers * float(sum(x.N * x.K * self.times(x, experts) for x in self.block.linears))

    def sizes(self, fp8: bool) -> Iterator[int]:
        """Tensor parallel sizes of its rollout: they split no head and, in FP8, no block of a weight."""
        block = BLOCK if fp8 else 1
        return (size for size in RANKS if self.block.kv_heads % size == 0 == self.block.intermediate % (size * block))


#: a model of 8B, whose parts `make hopper` measures, one of 32B and one of 70B
EIGHT = Net(MODELS[1], 36, 151936)
MEDIUM = Net(Model("Qwen3-32B", 5120, 25600, 64, 8), 64, 151936, nodes=4)
LARGE = Net(Model("Llama-3.1-70B", 8192, 28672, 64, 8), 80, 128256, nodes=8)
NETS = (
    Net(MODELS[0], 28, 152064),
    EIGHT,
    Net(MODELS[2], 32, 128256),
    MEDIUM,
    LARGE,
    Net(Model("Qwen3-30B-A3B", 2048, 768, 32, 4), 48, 151936, nodes=2, experts=128, active=8),
)


class Way(NamedTuple):
    """How a mode computes.

    Attributes:
        trains, samples: whether in FP8.
        passes: forward passes for old log-probs before the update.
        block: the mode whose launches in training are counted (``benchmarks.counted``).
        exact: has exact attention, and the rollout's ranks exchange FP32 parts; vLLM otherwise adds in BF16.
        cached: bytes of a value in the KV cache, with its share of a scale.
    """

    name: str
    trains: bool
    samples: bool
    passes: int
    block: str
    exact: bool = False
    cached: float = 2.0


#: e4m3, and an FP32 scale for each head of 128 values
FP8_CACHE = 1 + 4 / 128
WAYS = (
    Way("bf16", False, False, 1, "bf16"),
    Way("fp8-rollout", False, True, 1, "bf16"),
    Way("linear", True, True, 1, "linear"),
    Way("exact", True, True, 0, "exact", exact=True),
    Way("exact, with the pass", True, True, 1, "exact", exact=True),
    Way("exact, FP8 KV cache", True, True, 0, "exact, FP8 KV cache", exact=True, cached=FP8_CACHE),
)

#: the mode whose launches stand for those of mixtures in all modes, because no block of a mixture is counted
UNCOUNTED = "exact"
#: number of ranks -> bytes of an FP32 part below which exact mode adds in one shot
ONE_SHOT = {2: 8 << 20, 4: 512 << 10, 8: 256 << 10}
STRIDE = 64  # tokens between two checks of which sequences have ended


# ---- The time of a step: rollout, old log-probs, update -------------------------------------------------------------


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
    """A step's samples, the prompt tokens of each, and the longest response."""

    samples: int
    prompt: int
    longest: int

    def responses(self) -> np.ndarray:
        """Lengths: quantiles of an exponential distribution, whose mean is a quarter of the longest, cut off at the longest."""
        at = (np.arange(self.samples) + 0.5) / self.samples
        lengths = np.minimum(-np.log1p(-at) * self.longest / 4, self.longest)
        return np.random.default_rng(0).permutation(np.maximum(lengths, 1).astype(int))


def step(net: Net, way: Way, load: Load, gpu: Gpu) -> Step:
    """The phases of one step on ``8 * net.nodes`` GPUs, with the tensor parallelism that is best for the mode.

    Raises:
        ValueError: the model leaves no room for a KV cache.
    """
    forward, backward = (whole / (8 * net.nodes) for whole in training(net, way, load.responses() + load.prompt, gpu))
    seconds, tp = min((rollout(net, way, load, gpu, tp), tp) for tp in net.sizes(way.samples))
    if seconds == float("inf"):
        raise ValueError(f"{net.block.name} leaves no room for a KV cache. Give it more nodes.")
    return Step(seconds, way.passes * forward, 2 * forward + backward, tp)  # the update's forward runs twice: checkpointing


@functools.cache
def rollout(net: Net, way: Way, load: Load, gpu: Gpu, tp: int) -> float:
    """Seconds of the slowest replica; infinite if the weights leave no room for a KV cache."""
    replicas = 8 * net.nodes // tp
    return max(decoding(net, way, load.responses()[i::replicas], load.prompt, gpu, tp) for i in range(min(replicas, 2)))


def training(net: Net, way: Way, lengths: np.ndarray, gpu: Gpu) -> tuple[float, float]:
    """GPU seconds of a forward pass over all sequences, and of its backward."""
    tokens, peaks, block = float(lengths.sum()), gpu.peaks, net.block
    flops, a_byte = 2 * tokens * net.matrices(net.active) / 1e12, tokens / (peaks.bandwidth * 1e9)
    fprop, wgrad = (peaks.fp8, peaks.fp8_wgrad) if way.trains else (peaks.bf16, peaks.bf16)
    pairs = 2 * float((lengths.astype(float) ** 2).sum()) * block.heads * block.head_dim * net.layers  # causal: half of 4 c^2 d
    head = 2 * tokens * net.vocabulary * block.hidden
    attention = gpu.attention * (gpu.exact_attention if way.exact else 1)
    rest = (pairs / attention + head) / (peaks.bf16 * 1e12)
    dense = block._replace(intermediate=net.active * block.intermediate)
    there, back = (a_byte * net.layers * size for size in moved(dense, way.block if net.experts == 1 else UNCOUNTED))
    return flops / fprop + there + rest, flops * (1 / fprop + 1 / wgrad) + back + 2.25 * rest


def decoding(net: Net, way: Way, responses: np.ndarray, prompt: int, gpu: Gpu, tp: int) -> float:
    """Seconds in which one replica answers its prompts, as many at a time as its KV cache holds.

    Infinite if the cache cannot hold the longest.
    """
    size = net.matrices(net.experts) * (1 if way.samples else 2) + 4 * net.vocabulary * net.block.hidden
    per_token = 2 * way.cached * net.layers * net.block.kv_heads * net.block.head_dim
    room = (gpu.memory * gpu.room * tp - size) / per_token
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
    """Seconds of one decoding step of ``rows`` sequences with ``context`` tokens in all."""
    peaks, linears = gpu.peaks, 0.0
    peak = peaks.fp8 if way.samples else peaks.bf16
    for linear in net.block.linears:
        if net.times(linear, net.experts) == 1:
            linears += gemm_seconds(rows, linear.N // tp, linear.K, way.samples, peak, peaks.bandwidth)
        else:
            used = net.experts * (1 - (1 - net.active / net.experts) ** rows)
            size = used * linear.N * linear.K * (1 if way.samples else 2) / tp
            work = 2 * rows * net.active * linear.N * linear.K / tp
            linears += max(size / (peaks.bandwidth * 1e9), work / (peak * 1e12))
    if way.samples:
        linears /= gpu.fp8_decoding
    reads = 1.0 if not way.exact else gpu.cache_decoding if way.cached == FP8_CACHE else gpu.exact_decoding
    cache = context * 2 * way.cached * net.block.kv_heads * net.block.head_dim / tp / (peaks.bandwidth * 1e9) / reads
    shared = 2 * sum_over_ranks(rows * net.block.hidden, way.exact, gpu, tp)
    head = gemm_seconds(rows, net.vocabulary // tp, net.block.hidden, False, peaks.bf16, peaks.bandwidth)
    return net.layers * (linears + cache + shared) + head


def sum_over_ranks(elements: float, exact: bool, gpu: Gpu, tp: int) -> float:
    """Seconds of the sum after a row-parallel linear.

    A BF16 all-reduce sends and receives 2 (tp - 1) / tp elements of two bytes. Exact mode adds FP32 parts in rank order
    (``adapters.vllm.ranks``): small ones as it reads them from the other ranks' memory. Of larger ones a rank receives all parts,
    or one slice of all and then the BF16 slices of the sum. It writes what it receives to its memory and reads the parts again.
    """
    if tp == 1:
        return 0.0
    if not exact:
        return gpu.latency + 4 * elements * (tp - 1) / tp / gpu.link
    all_parts, a_byte = gpu.latency + 4 * elements * (tp - 1) / gpu.link, elements / (gpu.peaks.bandwidth * 1e9)
    if 4 * elements < ONE_SHOT[tp]:
        return all_parts
    by_slices = 2 * gpu.latency + 6 * elements * (tp - 1) / tp / gpu.link + (4 + 4 + 2 / tp + 2) * a_byte
    return min(all_parts + (4 * tp + 4 * tp + 2) * a_byte, by_slices)
