"""The linear layers of the benchmarked models, as a rollout engine holds them: q, k, v fused, and gate, up fused."""

from __future__ import annotations

from typing import NamedTuple


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


MODELS = (
    Model("Qwen2.5-7B", hidden=3584, intermediate=18944, heads=28, kv_heads=4),
    Model("Qwen3-8B", hidden=4096, intermediate=12288, heads=32, kv_heads=8),
    Model("Llama-3.1-8B", hidden=4096, intermediate=14336, heads=32, kv_heads=8),
)
#: numbers of rows: decode batches, and a trainer's batch
DECODE = (1, 8, 64, 256)
TRAIN = (2048, 16384)
#: tokens of Qwen3's vocabulary
VOCABULARY = 151_936
