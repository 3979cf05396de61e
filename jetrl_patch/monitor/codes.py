"""How many FP8 codes of a weight an optimizer step moved.

An update far below a code's step changes nothing that a rollout can see (QuRL's weight-update problem, arXiv
2602.13953). The codes of two weight syncs are compared on a fixed sample, so that nobody keeps a second copy of
the weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["MOST", "Codes", "sample"]

MOST = 1 << 16  # codes kept per layer


def sample(q_NK: Tensor) -> Tensor:
    """About ``MOST`` bytes of ``q`` [N, K], evenly spread and always the same places; all of a small one."""
    flat = q_NK.detach().contiguous().view(torch.uint8).flatten()
    step = flat.numel() // MOST | 1  # odd, so that it walks through all columns of a weight of even width
    return flat[::step].clone()


class Codes:
    """Samples of the last sync, by layer."""

    def __init__(self) -> None:
        self._last: dict[str, Tensor] = {}

    def compare(self, layer: str, q_NK: Tensor) -> Tensor | None:
        """Share of codes that are what they were at the last ``compare`` or ``keep``, FP64; None without one."""
        last, now = self._last.get(layer), sample(q_NK)
        self._last[layer] = now
        return None if last is None else (last.to(now.device) == now).double().mean()

    def keep(self, layer: str, q_NK: Tensor) -> None:
        """Remember the codes for the next sync."""
        self._last[layer] = sample(q_NK)

    def drop(self) -> None:
        """Forget all: the next sync is not compared."""
        self._last.clear()
