"""Which rows of attention a program computes; shared by the forward, what combines its chunks, and the backward.

A row is one query of one of the PER query heads that share a key/value head. The rows of a sequence are in the order
(token, head), so that decoding fills a tile too.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from jetrl_patch.kernels.gemm_common import rounded


class Tile(NamedTuple):
    """Rows of a program of the forward (at least 64, for ``wgmma``), keys of a block, pipeline depth and warps."""

    rows: int
    keys: int
    stages: int
    warps: int


#: head dimension -> tile. A warpgroup has 64 rows to itself, so that its scores stay in its registers. Two sums are held, a
#: chunk's and that of the chunks before it, and what spills is touched once a chunk. Nothing here may depend on the number of
#: rows, keys or requests
TILES = {64: Tile(64, 64, 2, 4), 128: Tile(128, 64, 2, 8)}
HEAD_DIMS = tuple(TILES)


@triton.jit
def narrowed(x, HARDWARE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Convert FP32 to BF16, ties to even."""
    if HARDWARE:
        return x.to(tl.bfloat16)
    else:
        return rounded(x)


@triton.jit
def sequence_of(block, starts, R, PER: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Find the sequence that a block of rows belongs to: sequence r owns blocks from starts[r] * PER // ROWS + r on.

    Every sequence gets at least as many blocks as it needs, and the grid depends on shapes only, not on values.
    """
    low = 0
    high = R
    while low < high:
        middle = (low + high) // 2
        if tl.load(starts + middle) * PER // ROWS + middle <= block:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def block_of(block, starts, R, PER: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the sequence of a block of rows, the sequence's first token, its number of tokens, and the block's first row.

    Nothing is left to do for a block whose first row is not below PER times the number of tokens.
    """
    r = sequence_of(block, starts, R, PER, ROWS)
    start = tl.load(starts + r)
    tokens = tl.load(starts + r + 1) - start
    return r, start, tokens, (block - (start * PER // ROWS + r)) * ROWS


@triton.jit
def rows_from(begin, tokens, kh, PER: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return, for ROWS rows of a sequence from ``begin`` on, whether there is such a row, its token and its query head."""
    row = begin + tl.arange(0, ROWS)
    return row < tokens * PER, tl.minimum(row, tokens * PER - 1) // PER, kh * PER + row % PER


def row_blocks(tokens: int, per: int, sequences: int, rows: int) -> int:
    """Number of row blocks that covers any split of ``tokens`` into ``sequences``."""
    return tokens * per // rows + sequences
