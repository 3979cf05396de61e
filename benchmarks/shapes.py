"""The models that are measured and counted, as a rollout engine holds them (q, k, v fused; gate, up fused), and a GPU's peaks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from jetrl_patch.backends.row_equality import Layout, Part
from jetrl_patch.kernels.formats import BLOCK


class Linear(NamedTuple):
    """One GEMM of a transformer block: N output features from K input features."""

    name: str
    N: int
    K: int


class Model(NamedTuple):
    """Dimensions from a published checkpoint's ``config.json``."""

    name: str
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int = 128

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The four GEMMs of a block, in order."""
        attention = self.heads * self.head_dim
        return (
            Linear("qkv", attention + 2 * self.kv_heads * self.head_dim, self.hidden),
            Linear("o", self.hidden, attention),
            Linear("gate_up", 2 * self.intermediate, self.hidden),
            Linear("down", self.hidden, self.intermediate),
        )

    def layouts(self, ranks: int) -> Iterator[tuple[Linear, Layout]]:
        """The GEMMs on the last of tensor-parallel ``ranks`` that differ from the trainer's; none where a block would be cut."""
        heads, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        if self.heads % ranks or self.kv_heads % ranks or heads % (ranks * BLOCK) or self.intermediate % (ranks * BLOCK):
            return
        fused = {"qkv": (heads, kv, kv), "gate_up": (self.intermediate, self.intermediate)}
        for name, N, K in self.linears:
            if name in fused:
                offsets = [sum(fused[name][:i]) // ranks for i in range(len(fused[name]))]
                parts = (Part(rows, rows - rows // ranks, rows, at) for rows, at in zip(fused[name], offsets, strict=True))
                yield Linear(name, N // ranks, K), Layout(tuple(parts))
            elif ranks > 1:
                yield Linear(name, N, K // ranks), Layout((Part(N, 0, N, 0),), ranks)


MODELS = (
    Model("Qwen2.5-7B", hidden=3584, intermediate=18944, heads=28, kv_heads=4),
    Model("Qwen3-8B", hidden=4096, intermediate=12288, heads=32, kv_heads=8),
    Model("Llama-3.1-8B", hidden=4096, intermediate=14336, heads=32, kv_heads=8),
)
#: the smallest model of many examples: its parts and what they are fused to get tiles of different widths on one rank
SMALL = Model("Qwen2.5-0.5B", hidden=896, intermediate=4864, heads=14, kv_heads=2, head_dim=64)
RANKS = (1, 2, 4, 8)  # sizes of a rollout's tensor parallelism
VOCABULARY = 151_936  # tokens of Qwen3's vocabulary


class Peaks(NamedTuple):
    """Arithmetic in TFLOP/s for BF16 and FP8 GEMMs, and memory bandwidth in GB/s, reads plus writes."""

    bf16: float
    fp8: float
    fp8_wgrad: float
    bandwidth: float


#: an H200: BF16 as measured elsewhere with cuBLAS, published FP8 kernels on Hopper, copies as measured elsewhere
PUBLISHED = Peaks(bf16=790.0, fp8=1250.0, fp8_wgrad=1000.0, bandwidth=4300.0)


def gemm_seconds(M: int, N: int, K: int, fp8: bool, peak: float, bandwidth: float) -> float:
    """The lower bound for one product with BF16 output: max(2 M N K / peak, bytes / bandwidth), in TFLOP/s and GB/s."""
    size = M * K + N * K + 2 * M * N if fp8 else 2 * (M * K + N * K + M * N)
    return max(2 * M * N * K / (peak * 1e12), size / (bandwidth * 1e9))
