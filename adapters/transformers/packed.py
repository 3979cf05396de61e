"""torch's attention over packed sequences, one after another: for models outside exact mode whose ranks share sequences."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jetrl_patch.adapters.transformers.attention import find_layout
from jetrl_patch.errors import ModelError

__all__ = ["PACKED", "packed_sdpa"]

#: its name in transformers
PACKED = "jetrl_packed"
#: arguments of transformers' attention functions that change nothing here
_HARMLESS = ("use_cache", "output_attentions", "cache_position")


def packed_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    position_ids: Tensor | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: query [1, H, T, D], key and value [1, KH, T, D] -> [1, T, H, D].

    Raises ModelError for what it does not compute: masks, windows, sinks, a cap on the scores.
    """
    unknown = [name for name, value in kwargs.items() if value is not None and name not in _HARMLESS]
    if unknown or attention_mask is not None or key.shape[2] != query.shape[2]:
        raise ModelError(
            f"{PACKED} computes plain causal attention of packed sequences, found {', '.join(unknown) or 'a mask or a cache'}. "
            "Set ulysses_sequence_parallel_size=1."
        )
    ends = find_layout(None, position_ids, (1, query.shape[2])).cu_seqlens.tolist()
    longest = max(b - a for a, b in itertools.pairwise(ends))
    if sliding_window is not None and longest > sliding_window:
        raise ModelError(
            f"{PACKED} has no sliding window, found one of {sliding_window} and a sequence of {longest}. "
            "Set ulysses_sequence_parallel_size=1."
        )
    pieces = [
        F.scaled_dot_product_attention(
            *(t[:, :, a:b] for t in (query, key, value)),
            dropout_p=dropout,
            is_causal=True,
            scale=scaling,
            enable_gqa=True,
        )
        for a, b in itertools.pairwise(ends)
    ]
    return torch.cat(pieces, 2).transpose(1, 2), None
