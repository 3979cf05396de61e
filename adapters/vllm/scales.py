"""The layout of a quantized linear's scales in the rollout: per 128x128 block, or per row.

Both are an FP32 parameter ``weight_scale_inv`` (the factor that dequantizes), with one row for each row of the weight, so
that any fused (qkv, gate_up) or tensor-parallel slice is a plain ``narrow``.
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
from jetrl_patch.sync.digest import Pieces

__all__ = ["BlockScales", "RowScales", "Scales"]


class Scales(Protocol):
    """The layout of a format's scales."""

    def parameter(self, n: int, k: int, load: Callable[..., None]) -> torch.nn.Parameter:
        """Create the scales of this rank's weight ``[n, k]``, to be loaded."""

    def cuts(self, k: int, whole: int) -> bool:
        """Whether a rank's ``k`` columns of ``whole`` cut through a block with one scale."""

    def per_row(self, loaded: torch.Tensor, rows: int, name: str) -> torch.Tensor:
        """Expand the scales of a whole weight, as received, to ``[rows, …]``. Raises SyncError for a wrong shape."""

    def add_to(self, pieces: Pieces, shard: Shard, scale: torch.Tensor) -> None:
        """Add this rank's scales, in the coordinates in which they were sent."""


class BlockScales:
    """``[N, ceil(K/128)]``: the scale of a 128x128 block is repeated for each of its rows.

    Each row carries its own scales, so widths need not be multiples of 128. vLLM's own block layout refuses fused layers
    whose parts are not multiples of 128.
    """

    def parameter(self, n: int, k: int, load: Callable[..., None]) -> torch.nn.Parameter:
        """FP32 ``[n, ceil(k/128)]``."""
        data = torch.ones(n, groups(k), dtype=torch.float32)
        return ModelWeightParameter(data=data, input_dim=1, output_dim=0, weight_loader=load)

    def cuts(self, k: int, whole: int) -> bool:
        """Whether a rank's share of K cuts a block."""
        return k != whole and bool(k % BLOCK)

    def per_row(self, loaded: torch.Tensor, rows: int, name: str) -> torch.Tensor:
        """Expand block scales ``[ceil(rows/128), G]`` from the trainer; per-row scales from a loader pass unchanged."""
        if loaded.shape[0] == rows:
            return loaded
        if loaded.shape[0] != groups(rows):
            raise SyncError(
                f"{name}.weight_scale_inv: required {groups(rows)} block rows or {rows} rows, found shape "
                f"{list(loaded.shape)}. Install the same version of jetrl_patch on both sides."
            )
        return expand_weight_scale(loaded, rows)

    def add_to(self, pieces: Pieces, shard: Shard, scale: torch.Tensor) -> None:
        """Reduce per-row scales ``[rows, G]`` to block scales. A block that ranks share is a separate rectangle, equal on all.

        If two rows of one block differ, ``pieces.read`` raises SyncError.
        """
        g0 = shard.col0 // BLOCK
        g1 = g0 + scale.shape[1]
        first, last = shard.row0 // BLOCK, groups(shard.row1)
        lead = -shard.row0 % BLOCK  # rows of a block that begins on another rank
        blocks = torch.cat((scale[:1], scale[lead::BLOCK])) if lead else scale[::BLOCK]
        block_of_row = (torch.arange(scale.shape[0], device=scale.device) + shard.row0 % BLOCK) // BLOCK
        pieces.refuse(
            (blocks.view(torch.int32)[block_of_row] != scale.view(torch.int32)).any(),
            f"{shard.name}.weight_scale_inv: rows of one 128-block hold different scales in the engine",
        )
        edges = {first, last}
        if shard.row0 % BLOCK:
            edges.add(first + 1)
        if shard.row1 % BLOCK and shard.row1 != shard.rows:
            edges.add(last - 1)
        for b0, b1 in itertools.pairwise(sorted(edges)):
            pieces.add(f"{shard.name}.weight_scale_inv", b0, b1, g0, g1, blocks[b0 - first : b1 - first])


class RowScales:
    """``[N, 1]``: one scale per output channel.

    A slice along K (row-parallel) keeps the scale of the whole row, because weights are quantized before they are sliced,
    while each rank's activations have the scale of its own slice.
    """

    def parameter(self, n: int, k: int, load: Callable[..., None]) -> torch.nn.Parameter:
        """FP32 ``[n, 1]``."""
        return ChannelQuantScaleParameter(data=torch.ones(n, 1, dtype=torch.float32), output_dim=0, weight_loader=load)

    def cuts(self, k: int, whole: int) -> bool:
        """Return False: a slice keeps whole rows' scales."""
        return False

    def per_row(self, loaded: torch.Tensor, rows: int, name: str) -> torch.Tensor:
        """Return the scales unchanged, ``[rows, 1]``."""
        if tuple(loaded.shape) != (rows, 1):
            raise SyncError(
                f"{name}.weight_scale_inv: required shape {[rows, 1]}, found {list(loaded.shape)}. "
                f"Install the same version of jetrl_patch on both sides."
            )
        return loaded

    def add_to(self, pieces: Pieces, shard: Shard, scale: torch.Tensor) -> None:
        """Add one rectangle; ranks that split a row along K hold the same scale."""
        pieces.add(f"{shard.name}.weight_scale_inv", shard.row0, shard.row1, 0, 1, scale)
