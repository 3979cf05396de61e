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


@dataclass(frozen=True)
class Shard:
    """A rectangle of one Hugging Face weight inside a local parameter.

    Attributes:
        name: Hugging Face module name, such as ``model.layers.0.self_attn.q_proj``.
        shard_id: vLLM's name for it in loaders: ``"q"``, ``0``, or None if nothing is fused.
        rows: N of the whole Hugging Face weight.
        row0, row1: rows of the whole weight that this rank holds.
        col0, col1: columns of the whole weight that this rank holds.
        offset: row of the local parameter that holds ``row0``.
    """

    name: str
    shard_id: str | int | None
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
    if len(names) == 1 and len(sizes) > 1:
        return _one_weight(names[0], sizes, k)
    found, offset = [], 0
    for name, (shard_id, rows, local, part) in zip(names, sizes, strict=True):
        found.append(Shard(name, shard_id, rows, part * local, (part + 1) * local, 0, k, offset))
        offset += local
    return found


def _one_weight(name: str, sizes: Sequence[tuple[str | int | None, int, int, int]], k: int) -> list[Shard]:
    """Return shards of a weight that Hugging Face fuses too: rectangles of one tensor, stacked by rows."""
    total, base, found, offset = sum(rows for _, rows, _, _ in sizes), 0, [], 0
    for shard_id, rows, local, part in sizes:
        found.append(Shard(name, shard_id, total, base + part * local, base + (part + 1) * local, 0, k, offset))
        base += rows
        offset += local
    return found
