"""Share of a weight's FP8 codes that an optimizer step leaves unchanged.

An update much smaller than the spacing of the codes is invisible to the rollout (QuRL's weight-update problem, arXiv
2602.13953). Two weight syncs are compared on a fixed sample of the codes, which avoids a second copy of the weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["MOST", "Codes", "sample"]

MOST = 1 << 16  # codes kept per layer; the experts of a block are one


def sample(q_NK: Tensor, most: int = MOST) -> Tensor:
    """About ``most`` bytes of ``q`` [N, K] at fixed, evenly spaced positions; every byte of a small tensor."""
    flat = q_NK.detach().contiguous().view(torch.uint8).flatten()
    step = flat.numel() // most | 1  # odd, so that the sample visits every column of a weight of even width
    return flat[::step].clone()


class Codes:
    """Samples of the last sync, keyed by layer."""

    def __init__(self) -> None:
        self._last: dict[str, Tensor] = {}

    def compare(self, layer: str, q_NK: Tensor, most: int = MOST) -> Tensor | None:
        """Share of codes unchanged since the last ``compare`` or ``keep``, FP64; None if there was none."""
        last, now = self._last.get(layer), sample(q_NK, most)
        self._last[layer] = now
        return None if last is None else (last.to(now.device) == now).double().mean()

    def keep(self, layer: str, q_NK: Tensor, most: int = MOST) -> None:
        """Remember the codes for the next sync."""
        self._last[layer] = sample(q_NK, most)

    def drop(self) -> None:
        """Forget every sample; the next sync is not compared."""
        self._last.clear()
