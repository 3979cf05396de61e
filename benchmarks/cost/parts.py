"""What the estimate stands on: peaks, the shares of them that kernels reach, and models. A measurement replaces its part."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.gpu.floors import PUBLISHED, Peaks
from benchmarks.gpu.shapes import RANKS, Model
from jetrl_patch.kernels.formats import BLOCK


class Gpu(NamedTuple):
    """One GPU.

    Attributes:
        peaks: what its GEMMs and copies reach.
        memory: bytes.
        link: bytes per second and direction to its neighbours.
    """

    name: str
    peaks: Peaks
    memory: float
    link: float


#: an H100 has an H200's arithmetic, and 3.35 of its 4.8 TB/s
H100 = Gpu("H100", PUBLISHED._replace(bandwidth=PUBLISHED.bandwidth * 3.35 / 4.8), 80e9, 450e9)


class Net(NamedTuple):
    """A whole model.

    Attributes:
        nodes: of eight GPUs each.
        experts, active: experts in a block, and of a token; 1 and 1 in a dense model.
    """

    block: Model
    layers: int
    vocabulary: int
    nodes: int = 1
    experts: int = 1
    active: int = 1

    @property
    def matrices(self) -> float:
        """Parameters of all quantized linear layers."""
        attention, mlp = self.weights()
        return self.layers * (attention + self.experts * mlp)

    def sizes(self, fp8: bool) -> Iterator[int]:
        """Tensor parallelisms of its rollout: heads are whole, and in FP8 no block of a weight is cut."""
        block = BLOCK if fp8 else 1
        for size in RANKS:
            if self.block.kv_heads % size == 0 == self.block.intermediate % (size * block):
                yield size

    def weights(self) -> tuple[float, float]:
        """Parameters of a block's attention, and of its MLP or one of its experts."""
        sizes = {linear.name: float(linear.N * linear.K) for linear in self.block.linears}
        return sizes["qkv"] + sizes["o"], sizes["gate_up"] + sizes["down"]


NETS = (
    Net(Model("Qwen3-8B", 4096, 12288, 32, 8), 36, 151936),
    Net(Model("Qwen3-32B", 5120, 25600, 64, 8), 64, 151936, nodes=4),
    Net(Model("Llama-3.1-70B", 8192, 28672, 64, 8), 80, 128256, nodes=8),
    Net(Model("Qwen3-30B-A3B", 2048, 768, 32, 4), 48, 151936, nodes=2, experts=128, active=8),
)


class Way(NamedTuple):
    """How a mode computes.

    Attributes:
        trains, samples: in FP8.
        passes: forward passes over the samples before the update, for old log-probs.
        attention, decoding: of BF16's speed, in the trainer and in the rollout. Estimated; in decoding,
            of contexts that enough programs share.
        gathers: FP32 sums over the rollout's ranks, which vLLM otherwise adds in BF16.
    """

    name: str
    trains: bool
    samples: bool
    passes: int
    attention: float = 1.0
    decoding: float = 1.0
    gathers: bool = False


WAYS = (
    Way("bf16", False, False, 1),
    Way("fp8-rollout", False, True, 1),
    Way("linear", True, True, 1),
    Way("exact", True, True, 0, attention=0.5, decoding=0.85, gathers=True),
    Way("exact, with the pass", True, True, 1, attention=0.5, decoding=0.85, gathers=True),
)

#: FlashAttention-3's share of the BF16 peak of GEMMs
ATTENTION = 0.75
#: of the speed that bytes allow, what the linears of decoding reach in FP8 with the quantization of their inputs
DECODED = 0.85
#: quantization in a training step: bytes per element of an activation and of a gradient (``benchmarks.gpu.floors``, "one read")
QUANTIZED = (5, 4)
#: bytes per token and layer that norms, rotary embedding, activation and residuals move forward: per hidden, per inner element
ELEMENTWISE = (75, 12)
#: seconds of a sum over ranks besides its bytes
LATENCY = 10e-6
#: share of a GPU's memory for weights and KV cache of the rollout
ROOM = 0.85
