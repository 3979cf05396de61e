"""Which rectangle of the whole weights a rank of tensor parallelism holds, from vLLM's own classes of layers."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)

from jetrl_patch.adapters.vllm.shards import Shard, shards_of


def layer(kind: type, rank: int, ranks: int, **sizes: Any) -> Any:
    """A rank's layer without its memory: vLLM's class with the sizes that its constructor sets."""
    found = kind.__new__(kind)
    found.__dict__.update(tp_rank=rank, tp_size=ranks, prefix="layer", **sizes)
    return found


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_columns_of_a_row_parallel_layer(rank: int) -> None:
    found = layer(RowParallelLinear, rank, 4, input_size=1024, input_size_per_partition=256, output_size=384)
    assert shards_of(found, ["o_proj"]) == [Shard("o_proj", None, 384, 0, 384, 256 * rank, 256 * (rank + 1), 0)]


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_rows_of_the_others(rank: int) -> None:
    column = layer(ColumnParallelLinear, rank, 4, input_size=256, output_size=1024, output_size_per_partition=256)
    assert shards_of(column, ["up"]) == [Shard("up", None, 1024, 256 * rank, 256 * (rank + 1), 0, 256, 0)]
    merged = layer(MergedColumnParallelLinear, rank, 4, input_size=256, output_sizes=[512, 1024])
    gate, up = shards_of(merged, ["gate", "up"])
    assert gate == Shard("gate", 0, 512, 128 * rank, 128 * (rank + 1), 0, 256, 0)
    assert up == Shard("up", 1, 1024, 256 * rank, 256 * (rank + 1), 0, 256, 128)
    whole = layer(ReplicatedLinear, rank, 4, input_size=256, output_size=128)
    assert shards_of(whole, ["router"]) == [Shard("router", None, 128, 0, 128, 0, 256, 0)]


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_a_key_head_that_two_ranks_share(rank: int) -> None:
    heads = {"head_size": 64, "total_num_heads": 8, "num_heads": 2, "total_num_kv_heads": 2, "num_kv_heads": 1}
    found = layer(QKVParallelLinear, rank, 4, input_size=256, num_kv_head_replicas=2, **heads)
    q, k, v = shards_of(found, ["q_proj", "k_proj", "v_proj"])
    assert (q.row0, q.row1, q.offset) == (128 * rank, 128 * (rank + 1), 0)
    assert (k.row0, k.row1, k.offset) == (64 * (rank // 2), 64 * (rank // 2 + 1), 128)
    assert (v.row0, v.row1, v.offset, v.shard_id) == (k.row0, k.row1, 192, "v")
    with pytest.raises(ValueError, match="q_proj, k_proj fill 2 of the 3 parts of layer"):
        shards_of(found, ["q_proj", "k_proj"])
