"""The log-probs of tokens as verl computes them in BF16, which is what an unchanged run does."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

#: logits [M, V] and labels [M] -> log-probs [M]
Formula = Callable[[Tensor, Tensor], Tensor]


def plain(logits_MV: Tensor, labels_M: Tensor) -> Tensor:
    """In the logits' dtype, of all rows at once: what a compiler is given."""
    return torch.log_softmax(logits_MV, -1).gather(-1, labels_M[:, None])[:, 0]


def row_by_row(logits_MV: Tensor, labels_M: Tensor) -> Tensor:
    """The same for each token in turn: verl's ``logprobs_from_logits_v2`` for BF16."""
    return torch.stack([plain(row_V[None], label[None])[0] for row_V, label in zip(logits_MV, labels_M)])


def of_verl() -> tuple[str, Formula]:
    """What verl's ``logprobs_from_logits`` takes, and its name: flash-attn's cross-entropy if it is there, else by rows."""
    try:
        from flash_attn.ops.triton.cross_entropy import cross_entropy_loss
    except ImportError:
        return "row by row, as verl without flash-attn", row_by_row

    def fused(logits_MV: Tensor, labels_M: Tensor) -> Tensor:
        """The gradient is written over the logits, as verl asks for."""
        found: Tensor = -cross_entropy_loss(logits_MV, labels_M, inplace_backward=True)[0]
        return found

    return "flash-attn's cross-entropy, as verl with it", fused
