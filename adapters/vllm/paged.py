"""One step of exact attention over vLLM's paged cache, shared by the backends of all devices."""

from __future__ import annotations

from typing import Any

import torch

from jetrl_patch.exact import ops

__all__ = ["attend"]


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, step: Any, scale: float, output: torch.Tensor
) -> torch.Tensor:
    """Fill ``output [T, H, D]`` in place and return it.

    Args:
        query: ``[T, H, D]``; rows after ``step.num_actual_tokens`` are padding, as in ``output``.
        keys, values: the cache, each ``[blocks, block size, KH, D]`` with any strides.
        step: the backend's step metadata, with vLLM's field names.
    """
    tokens = step.num_actual_tokens
    rows = output[:tokens].view(tokens, *query.shape[1:])
    ops.attention_paged(
        query[:tokens], keys, values, step.block_table, step.seq_lens, step.query_start_loc, scale, rows
    )
    return output
