"""Names and parts of Hugging Face weights in vLLM's modules, which fuse them and split them over ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from jetrl_patch.models.families import FAMILIES, family_of

if TYPE_CHECKING:
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.models.utils import WeightsMapper


# ---- Module names in vLLM and in transformers. A sync uses transformers' names -------------------
# Text models have the same names in both. In a vision-language model vLLM has ``language_model.model.layers.0`` where
# transformers has ``model.language_model.layers.0``. vLLM's model classes map the names for loading checkpoints
# (``hf_to_vllm_mapper``), and vLLM passes this map to a quantization before it builds a layer (``apply_vllm_mapper``).
#
# If transformers renames parts of a block as it loads a checkpoint, vLLM keeps the checkpoint's names: see ``Family.stored``.

def hf_name(name: str, mapper: WeightsMapper | None) -> str:
    """Return transformers' name for vLLM's module ``name``: the first prefix that the map turns back into ``name``.

    Classes list the prefixes of current checkpoints before those of older ones.
    """
    for family in FAMILIES.values():
        if family.stored.get("mlp") in name.split("."):
            return family.from_stored(name)
    if mapper is None or name.startswith("model."):  # the same in both
        return name
    whole = f"{name}."  # a prefix may be all of it
    for theirs, ours in dict(mapper.orig_to_new_prefix).items():
        if ours is not None and whole.startswith(ours):
            found = theirs + whole.removeprefix(ours)
            if mapper.apply_list([found]) == [whole]:
                return found.removesuffix(".")
    return name


# ---- Shards: rectangles of Hugging Face weights in a fused, tensor-parallel layer ----------------
# vLLM fuses ``q_proj``, ``k_proj`` and ``v_proj`` into one ``qkv_proj`` and gives each rank some of its rows (for row-parallel
# layers: columns). The trainer knows only whole Hugging Face weights ``[N, K]``. A ``Shard`` maps a rectangle of such a weight to
# rows of the local parameter. Loading and checking use the same map.

#: weights that fill more than one part of a fused layer -> number of parts
_PARTS = {"in_proj_qkv": 3}


@dataclass(frozen=True)
class Shard:
    """A rectangle of one Hugging Face weight inside a local parameter.

    Attributes:
        name: Hugging Face module name, such as ``model.layers.0.self_attn.q_proj``.
        shard_id: vLLM's name for it in a loader: ``"q"``, ``0``, ``(0, 1, 2)`` for a weight that fills three parts of a layer
            with more, or None if nothing is fused.
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


def merged_already(packed: Mapping[str, Sequence[str]], hf_config: Any) -> dict[str, list[str]]:
    """Layers that vLLM declares as merged from parts, but that are one layer in transformers' model too, as gate and up of GLM.

    Only for models without a record in ``FAMILIES``: vLLM's declarations for those have been compared.
    """
    if family_of(hf_config) is not None:
        return {}
    linears = _linears(hf_config)
    return {name: [name] for name, parts in packed.items() if name in linears and not linears.issuperset(parts)}


def _linears(hf_config: Any) -> frozenset[str]:
    """The last parts of the names of all linears of transformers' model; empty if transformers does not have it."""
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(hf_config)
    except ValueError:  # transformers does not know the configuration
        return frozenset()
    return frozenset(name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, torch.nn.Linear))


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
    #: of each fused part: its id, N of the whole weight, N of this rank, and which of the ranges of that size this rank holds
    sizes: list[tuple[str | int | None, int, int, int]]
    if isinstance(layer, RowParallelLinear):
        width = layer.input_size_per_partition
        return [Shard(names[0], None, layer.output_size, 0, layer.output_size, rank * width, (rank + 1) * width, 0)]
    if isinstance(layer, QKVParallelLinear):
        size = layer.head_size
        kv = (layer.total_num_kv_heads * size, layer.num_kv_heads * size, rank // layer.num_kv_head_replicas)
        sizes = [("q", layer.total_num_heads * size, layer.num_heads * size, rank), ("k", *kv), ("v", *kv)]
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
        whole = tuple(range(at, at + count)) if 1 < count < len(sizes) else None  # vLLM's loader takes all of them in one call
        rows, base = sum(size for _, size, _, _ in parts), 0
        for shard_id, size, local, part in parts:
            row0 = base + part * local
            found.append(Shard(name, whole or shard_id, rows, row0, row0 + local, 0, k, offset))
            base, offset = base + size, offset + local
        at += count
    if at != len(sizes):
        raise ValueError(f"{', '.join(names)} fill {at} of the {len(sizes)} parts of {layer.prefix}")
    return found
