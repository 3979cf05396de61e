"""The log-probs of tokens as verl computes them in BF16, which is what an unchanged run does."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

#: logits [M, V] and labels [M] -> log-probs [M]
Formula = Callable[[Tensor, Tensor], Tensor]


class Named(NamedTuple):
    """A formula, and what a table calls it."""

    name: str
    run: Formula


def plain(logits_MV: Tensor, labels_M: Tensor) -> Tensor:
    """In the logits' dtype, of all rows at once: what a compiler is given."""
    return torch.log_softmax(logits_MV, -1).gather(-1, labels_M[:, None])[:, 0]


def row_by_row(logits_MV: Tensor, labels_M: Tensor) -> Tensor:
    """The same for each token in turn: verl's ``logprobs_from_logits_v2`` for BF16."""
    found = [
        torch.log_softmax(row_V, -1).gather(-1, label.unsqueeze(-1)).squeeze(-1) for row_V, label in zip(logits_MV, labels_M)
    ]
    return torch.stack(found)


def of_verl() -> Named:
    """What verl's ``logprobs_from_logits`` takes: flash-attn's cross-entropy if it can be imported, else row after row."""
    try:
        from flash_attn.ops.triton.cross_entropy import cross_entropy_loss
    except ImportError:
        return Named("row by row, as verl without flash-attn", row_by_row)

    def fused(logits_MV: Tensor, labels_M: Tensor) -> Tensor:
        """The gradient is written over the logits, as verl asks for."""
        found: Tensor = -cross_entropy_loss(logits_MV, labels_M, inplace_backward=True)[0]
        return found

    return Named("flash-attn's cross-entropy, as verl with it", fused)
