"""Map a fused, tensor-parallel vLLM linear to Hugging Face weights.

vLLM fuses ``q_proj``, ``k_proj`` and ``v_proj`` into one ``qkv_proj`` and gives each rank some of its rows (or, for
row-parallel layers, columns). The trainer knows only whole Hugging Face weights ``[N, K]``. A ``Shard`` maps a rectangle
of a Hugging Face weight to rows of the local parameter; loading and checking use the same map.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.model_executor.layers.linear import LinearBase

__all__ = ["Shard", "hf_names", "shards_of"]

#: weights that fill several parts of a layer in which vLLM fuses them with others -> how many
_PARTS = {"in_proj_qkv": 3}


@dataclass(frozen=True)
class Shard:
    """A rectangle of one Hugging Face weight inside a local parameter.

    Attributes:
        name: Hugging Face module name, such as ``model.layers.0.self_attn.q_proj``.
        shard_id: vLLM's name for it in loaders: ``"q"``, ``0``, ``(0, 1, 2)`` if the weight fills these parts of a layer that
            holds others too, or None if nothing is fused.
        rows: N of the whole Hugging Face weight.
        row0, row1: rows of the whole weight that this rank holds.
        col0, col1: columns of the whole weight that this rank holds.
        offset: row of the local parameter that holds ``row0``.
    """

    name: str
    shard_id: str | int | tuple[int, ...] | None
    rows: int
    row0: int
    row1: int
    col0: int
    col1: int
    offset: int


def hf_names(prefix: str, packed: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the Hugging Face names of the modules fused under ``prefix``, in order; otherwise ``[prefix]``."""
    parent, _, leaf = prefix.rpartition(".")
    stem = f"{parent}." if parent else ""
    return [stem + part for part in packed.get(leaf, (leaf,))]


def shards_of(layer: LinearBase, names: Sequence[str]) -> list[Shard]:
    """Return the rectangles that make up this rank's parameter of ``layer``; ``names`` is from ``hf_names``."""
    from vllm.model_executor.layers.linear import (
        ColumnParallelLinear,
        MergedColumnParallelLinear,
        QKVParallelLinear,
        RowParallelLinear,
    )

    rank, k = layer.tp_rank, layer.input_size
    if isinstance(layer, RowParallelLinear):
        width = layer.input_size_per_partition
        return [Shard(names[0], None, layer.output_size, 0, layer.output_size, rank * width, (rank + 1) * width, 0)]
    if isinstance(layer, QKVParallelLinear):
        kv_rank = rank // layer.num_kv_head_replicas
        kv_rows = layer.total_num_kv_heads * layer.head_size
        kv_local = layer.num_kv_heads * layer.head_size
        q_local = layer.num_heads * layer.head_size
        sizes: list[tuple[str | int | None, int, int, int]] = [
            ("q", layer.total_num_heads * layer.head_size, q_local, rank),
            ("k", kv_rows, kv_local, kv_rank),
            ("v", kv_rows, kv_local, kv_rank),
        ]
    elif isinstance(layer, MergedColumnParallelLinear):
        sizes = [(i, n, n // layer.tp_size, rank) for i, n in enumerate(layer.output_sizes)]
    elif isinstance(layer, ColumnParallelLinear):
        sizes = [(None, layer.output_size, layer.output_size_per_partition, rank)]
    else:
        sizes = [(None, layer.output_size, layer.output_size, 0)]
    found: list[Shard] = []
    at = offset = 0
    for name in names:
        count = len(sizes) if len(names) == 1 else _PARTS.get(name.rpartition(".")[2], 1)
        parts = sizes[at : at + count]
        whole = tuple(range(at, at + count)) if 1 < count < len(sizes) else None  # what vLLM's loader gets for all of them
        rows, base = sum(size for _, size, _, _ in parts), 0
        for shard_id, size, local, part in parts:
            row0 = base + part * local
            found.append(Shard(name, whole or shard_id, rows, row0, row0 + local, 0, k, offset))
            base, offset = base + size, offset + local
        at += count
    if at != len(sizes):
        raise ValueError(f"{', '.join(names)} fill {at} of the {len(sizes)} parts of {layer.prefix}")
    return found
