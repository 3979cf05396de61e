"""The engine's scales as rectangles of what was sent: they tile it for any split, and an uneven block is refused."""

from __future__ import annotations

import itertools

import pytest
import torch

from jetrl_patch.adapters.vllm.formats import BlockScales, RowScales
from jetrl_patch.adapters.vllm.shards import Shard
from jetrl_patch.backends.quantize import expand_weight_scale
from jetrl_patch.config.formats import FORMATS
from jetrl_patch.errors import SyncError
from jetrl_patch.sync.digest import Pieces, digest
from jetrl_patch.sync.receive import check_tiling

ROWS, COLS = 700, 512  # 6 blocks of rows, the last one of 60


def shard(row0: int, row1: int, col0: int = 0, col1: int = COLS) -> Shard:
    return Shard(name="q", shard_id=None, rows=ROWS, row0=row0, row1=row1, col0=col0, col1=col1, offset=0)


@pytest.mark.parametrize("cuts", [(), (128,), (100,), (100, 101), (1, 127, 129), (640, 699), (350,), (256, 384)], ids=str)
def test_block_scales_tile_the_tensor_for_any_split(cuts):
    blocks = torch.rand(6, 4)
    rows, pieces = expand_weight_scale(blocks, ROWS), Pieces()
    for row0, row1 in itertools.pairwise((0, *cuts, ROWS)):
        for col0, col1 in ((0, 256), (256, COLS)):
            BlockScales().add_to(pieces, shard(row0, row1, col0, col1), rows[row0:row1, col0 // 128 : col1 // 128])
    check_tiling("q.weight_scale_inv", (6, 4), digest(blocks), pieces.read())


def test_rows_of_one_block_must_agree():
    rows, pieces = expand_weight_scale(torch.rand(6, 4), ROWS), Pieces()
    rows[200, 3] += 1
    BlockScales().add_to(pieces, shard(100, 150), rows[100:150])
    assert len(pieces.read()) == 2
    BlockScales().add_to(pieces, shard(150, 300), rows[150:300])
    with pytest.raises(SyncError, match=r"q\.weight_scale_inv: rows of one block hold different scales"):
        pieces.read()


def test_scales_of_mxfp8_tile_the_tensor_for_any_split():
    """One scale per row and 32 columns, so that a split at column 224 cuts no block."""
    scales, pieces, mx = torch.rand(ROWS, COLS // 32), Pieces(), BlockScales(FORMATS["mxfp8"])
    for row0, row1 in itertools.pairwise((0, 1, 100, 640, ROWS)):
        for col0, col1 in ((0, 224), (224, COLS)):
            mx.add_to(pieces, shard(row0, row1, col0, col1), scales[row0:row1, col0 // 32 : col1 // 32])
    check_tiling("q.weight_scale_inv", (ROWS, COLS // 32), digest(scales), pieces.read())
    assert not mx.cuts(224, COLS) and mx.cuts(208, COLS) and mx.cuts(16, 48)
    with pytest.raises(SyncError, match=f"required {ROWS} block rows"):
        mx.per_row(torch.rand(6, 4), ROWS, "q")


def test_row_scales():
    scales, pieces = torch.rand(ROWS, 1), Pieces()
    for row0, row1 in ((0, 300), (300, ROWS)):
        RowScales().add_to(pieces, shard(row0, row1), scales[row0:row1])
    check_tiling("q.weight_scale_inv", (ROWS, 1), digest(scales), pieces.read())
