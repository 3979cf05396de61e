"""vLLM's rotary embedding on a CPU, for queries that have a dimension for their heads, as in latent attention.

The kernel takes the row of a query [T, heads, width] for as long as that of one head, and rotates other numbers (seen in 0.30; no
error says so). In two dimensions, [T, heads * width], it is right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["in_two_dimensions"]


def in_two_dimensions(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``RotaryEmbedding.forward_cpu``. What it returns counts: of a query in slices it rotates a copy."""

    def forward_cpu(self: Any, positions: Any, query: Any, key: Any = None) -> tuple[Any, Any]:
        flat = [None if x is None else x.reshape(positions.numel(), -1) for x in (query, key)]
        rotated = original(self, positions, *flat)
        query_out, key_out = (x if x is None else x.view(old.shape) for x, old in zip(rotated, (query, key), strict=True))
        return query_out, key_out

    return forward_cpu
