"""Where the scales of a quantized linear lie in a rollout: one per 128-block, or one per row.

Both stand beside the weight as FP32 ``weight_scale_inv`` (what a byte is multiplied with), a row of it for each row of the
weight, so that any fused (qkv, gate_up) or tensor-parallel slice is a plain ``narrow``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Protocol

import torch
from vllm.model_executor.parameter import ChannelQuantScaleParameter, ModelWeightParameter

from jetrl_patch.adapters.vllm.shards import Shard
from jetrl_patch.errors import SyncError
from jetrl_patch.fp8.formats import BLOCK, groups
from jetrl_patch.fp8.quantize import expand_weight_scale
from jetrl_patch.sync.digest import Rect, digest

__all__ = ["BlockScales", "RowScales", "Scales"]


class Scales(Protocol):
    """The layout of a format's scales."""

    def parameter(self, n: int, k: int, load: Callable[..., None]) -> torch.nn.Parameter:
        """Scales of this rank's weight ``[n, k]``, to be loaded."""

    def cuts(self, k: int, whole: int) -> bool:
        """Whether a rank's ``k`` columns of ``whole`` cut what has one scale."""

    def per_row(self, loaded: torch.Tensor, rows: int, name: str) -> torch.Tensor:
        """Scales of a whole weight, as they arrive -> ``[rows, …]``. Raises SyncError for another shape."""

    def rects(self, shard: Shard, scale: torch.Tensor) -> list[Rect]:
        """Digests of this rank's scales, in the coordinates in which they were sent."""


class BlockScales:
    """``[N, ceil(K/128)]``: the scale of a 128x128 block stands once per row.

    Rows then carry everything they need, so widths need not be multiples of 128. vLLM's own block layout cannot do that:
    it refuses fused layers whose parts are not multiples of 128.
    """

    def parameter(self, n: int, k: int, load: Callable[..., None]) -> torch.nn.Parameter:
        """FP32 ``[n, ceil(k/128)]``."""
        data = torch.ones(n, groups(k), dtype=torch.float32)
        return ModelWeightParameter(data=data, input_dim=1, output_dim=0, weight_loader=load)

    def cuts(self, k: int, whole: int) -> bool:
        """Whether a rank's share of K is not whole blocks."""
        return k != whole and bool(k % BLOCK)

    def per_row(self, loaded: torch.Tensor, rows: int, name: str) -> torch.Tensor:
        """Block scales ``[ceil(rows/128), G]`` as the trainer sends them, or per row as a loader hands them on."""
        if loaded.shape[0] == rows:
            return loaded
        if loaded.shape[0] != groups(rows):
            raise SyncError(
                f"{name}.weight_scale_inv: expected {groups(rows)} block rows (or {rows} rows), but got shape "
                f"{list(loaded.shape)}"
            )
        return expand_weight_scale(loaded, rows)

    def rects(self, shard: Shard, scale: torch.Tensor) -> list[Rect]:
        """Per-row scales ``[rows, G]`` as block scales. A block that ranks share is a rectangle of its own, equal on all.

        Raises SyncError if two rows of one block differ.
        """
        g0 = shard.col0 // BLOCK
        g1 = g0 + scale.shape[1]
        first, last = shard.row0 // BLOCK, groups(shard.row1)
        tops = [max(block * BLOCK, shard.row0) - shard.row0 for block in range(first, last)]
        blocks = scale[tops]
        sizes = [min((block + 1) * BLOCK, shard.row1) - max(block * BLOCK, shard.row0) for block in range(first, last)]
        expanded = blocks.repeat_interleave(torch.tensor(sizes, device=blocks.device), 0)
        if not torch.equal(expanded.view(torch.int32), scale.view(torch.int32)):
            raise SyncError(f"{shard.name}.weight_scale_inv: rows of one 128-block hold different scales in the engine")
        edges = {first, last}
        if shard.row0 % BLOCK:
            edges.add(first + 1)
        if shard.row1 % BLOCK and shard.row1 != shard.rows:
            edges.add(last - 1)
        return [
            Rect(f"{shard.name}.weight_scale_inv", b0, b1, g0, g1, digest(blocks[b0 - first : b1 - first], b0, g0))
            for b0, b1 in itertools.pairwise(sorted(edges))
        ]


class RowScales:
    """``[N, 1]``: one scale per output channel.

    A slice along K (row-parallel) keeps the scale of the whole row, because weights are quantized before they are sliced,
    while each rank's activations have the scale of its own slice.
    """

    def parameter(self, n: int, k: int, load: Callable[..., None]) -> torch.nn.Parameter:
        """FP32 ``[n, 1]``."""
        return ChannelQuantScaleParameter(data=torch.ones(n, 1, dtype=torch.float32), output_dim=0, weight_loader=load)

    def cuts(self, k: int, whole: int) -> bool:
        """Never."""
        return False

    def per_row(self, loaded: torch.Tensor, rows: int, name: str) -> torch.Tensor:
        """As it is, ``[rows, 1]``."""
        if tuple(loaded.shape) != (rows, 1):
            raise SyncError(
                f"{name}.weight_scale_inv: expected one scale for each of {rows} rows, but got shape {list(loaded.shape)}"
            )
        return loaded

    def rects(self, shard: Shard, scale: torch.Tensor) -> list[Rect]:
        """One rectangle; ranks that share a row along K hold the same."""
        value = digest(scale, shard.row0)
        return [Rect(f"{shard.name}.weight_scale_inv", shard.row0, shard.row1, 0, 1, value)]
