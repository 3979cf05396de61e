"""Digests of what a weight sync sends as it is: embeddings, ``lm_head``, norms, biases, routers, layers left in BF16.

A parameter is compared only if this rank holds it as it was sent: in the announced dtype or in FP32, and whole or as a rectangle
that a ``Shard`` describes. The others (casts, transformed towers) are checked for completeness alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from jetrl_patch.adapters.vllm.guard import guarded_modules
from jetrl_patch.adapters.vllm.live import unpacked
from jetrl_patch.adapters.vllm.method import quantized_modules
from jetrl_patch.adapters.vllm.names import hf_name
from jetrl_patch.adapters.vllm.shards import hf_names, shards_of
from jetrl_patch.sync.digest import Pieces, as_2d
from jetrl_patch.sync.manifest import dtype_name

__all__ = ["add_plain"]

#: shape and dtype of each tensor that a sync announced, by Hugging Face name
Sent = Mapping[str, tuple[tuple[int, ...], str]]

#: what a gated delta net has, and no other layer that vLLM runs
_DELTA_NET = ("A_log", "dt_bias", "conv1d", "key_dim", "value_dim")


def add_plain(pieces: Pieces, model: torch.nn.Module, sent: Sent) -> None:
    """Add what this rank holds of ``sent``, under Hugging Face's names and coordinates."""
    mapper, packed = getattr(model, "hf_to_vllm_mapper", None), getattr(model, "packed_modules_mapping", {})
    names = {id(layer): method.names for layer, method in quantized_modules(model)}
    names |= {id(layer): guarded for layer, guarded in guarded_modules(model)}
    done = {f"{name}.weight" for held in names.values() for name in held}  # ``installed`` has them
    nets = {prefix for prefix, module in model.named_modules() if all(hasattr(module, key) for key in _DELTA_NET)}
    for prefix, module in model.named_modules():
        name = hf_name(prefix, mapper)
        if prefix in nets:
            found = _of_delta_net(module, name)
        elif prefix.removesuffix(".conv1d") in nets:
            continue  # its delta net has it
        elif isinstance(module, LinearBase):
            parts = names.get(id(module)) or hf_names(name, packed)
            found = chain(_of_linear(module, parts, sent), _beside_weight(module, name))
        elif isinstance(module, VocabParallelEmbedding):
            at = module.shard_indices
            rows = slice(at.org_vocab_start_index, at.org_vocab_end_index)
            found = iter([(f"{name}.weight", rows, slice(None), module.weight.data[: rows.stop - rows.start])])
        else:
            held = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
            found = ((f"{name}.{key}", slice(None), slice(None), tensor.data) for key, tensor in held)
        for tensor, rows, columns, data in found:
            if tensor in sent and tensor not in done:
                _add(pieces, tensor, sent[tensor], rows, columns, data)


_Piece = tuple[str, slice, slice, torch.Tensor]


def _of_delta_net(net: Any, name: str) -> Iterator[_Piece]:
    """Yield this rank's heads of a gated delta net: its decays, and the rows of its convolution, which are those of q, k and v.

    vLLM holds ``A_log`` in FP32.
    """
    rank, ranks = net.tp_rank, net.tp_size
    for key in ("A_log", "dt_bias"):
        data = getattr(net, key).data
        yield f"{name}.{key}", slice(None), slice(rank * data.numel(), (rank + 1) * data.numel()), data
    weight, base, offset = unpacked(net.conv1d).data, 0, 0
    for size in (net.key_dim, net.key_dim, net.value_dim):
        local = size // ranks
        rows = slice(base + rank * local, base + (rank + 1) * local)
        yield f"{name}.conv1d.weight", rows, slice(None), weight[offset : offset + local]
        base, offset = base + size, offset + local


def _of_linear(layer: LinearBase, names: list[str], sent: Sent) -> Iterator[_Piece]:
    """Yield the pieces of a linear layer's weight and bias, if it holds something that was sent."""
    if not any(f"{name}.{key}" in sent for name in names for key in ("weight", "bias")):
        return
    weight, bias = (getattr(layer, key, None) for key in ("weight", "bias"))
    for shard in shards_of(layer, names):
        local = slice(shard.offset, shard.offset + shard.row1 - shard.row0)
        rows, columns = slice(shard.row0, shard.row1), slice(shard.col0, shard.col1)
        if weight is not None:
            yield f"{shard.name}.weight", rows, columns, weight.data[local]
        if bias is not None:
            yield f"{shard.name}.bias", slice(None), rows, bias.data[local]


def _beside_weight(layer: torch.nn.Module, name: str) -> Iterator[_Piece]:
    """Yield what a linear layer holds beside weight and bias, whole: the correction of scores in a router."""
    for key, tensor in layer.named_parameters(recurse=False):
        if key not in ("weight", "bias"):
            yield f"{name}.{key}", slice(None), slice(None), tensor.data


def _add(
    pieces: Pieces, name: str, announced: tuple[tuple[int, ...], str], rows: slice, columns: slice, data: torch.Tensor
) -> None:
    """Add one piece if it is what was announced for this place; an empty slice stands for everything.

    What is held in FP32 and was sent in BF16 must have lost nothing: it is compared as it was sent.
    """
    (shape, dtype), matrix = announced, as_2d(data)
    whole = as_2d(torch.empty(shape, device="meta")).shape
    (row0, row1, _), (col0, col1, _) = rows.indices(whole[0]), columns.indices(whole[1])
    if tuple(matrix.shape) != (row1 - row0, col1 - col0) or not matrix.numel():
        return
    if data.dtype == torch.float32 and dtype == "bfloat16":
        sent = data.to(torch.bfloat16)
        pieces.refuse((sent != data).any(), f"{name}: the engine holds FP32 values that are not those that were sent in BF16")
        data = sent
    if dtype_name(data.dtype) == dtype:
        pieces.add(name, row0, row1, col0, col1, data)
