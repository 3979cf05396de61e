"""Which rows of attention a program computes, and the chunks of keys that keep a row's bits independent of the programs."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl_patch.kernels.aot import Spec
from jetrl_patch.kernels.gemm_common import PINNED, rounded

# ---- Which rows of attention a program computes; shared by the forward, what combines its chunks, and the backward
# A row is one query of one of the PER query heads that share a key/value head. The rows of a sequence are in the order
# (token, head), so that decoding fills a tile too.

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


# ---- Chunks of keys: what makes the bits of a row independent of how many programs share its context
# Attention cuts the keys of a sequence at multiples of CHUNK, counted from the sequence's first key. A chunk has a state of its
# own, which nothing before it enters:
#
#     m [ROWS]     the largest score        l [ROWS]     the sum of 2^(s - m)        a [ROWS, D]  the sum of 2^(s - m) v
#
# ``combine`` adds the states in ascending order. One program may do all of it, as in training; or each chunk gets a program
# that stores the state in FP32, and ``combine_kernel`` adds them: the same operations on the same values in the same order.
#
# A row may lie in a tile with rows that see a chunk that it does not see. Where one program does all chunks, it adds that
# chunk's state, (LOWEST, 0, 0); ``combine_kernel`` puts the same state in the place of what was stored. It changes nothing:
# the maximum stays, the factors are exp2(0) = 1 and 0, and fma(x, 1, 0) = x.

#: keys in a chunk. Trainer and rollout must agree on it: it decides where sums begin
CHUNK = 1024
#: the maximum of no scores: finite, because -inf - -inf is not a number
LOWEST = tl.constexpr(-3.4028234663852886e38)

#: A launch shares contexts among at most this many programs; two run on each of a Hopper's 132 multiprocessors at a time.
#: Those that a short context leaves without a chunk end at once, but are not free. Estimated; bits do not depend on it.
PROGRAMS = 2048
#: maximum bytes of stored states; a launch that would need more does all chunks of a row in one program
WORKSPACE = 64 << 20

#: head dimension -> rows per program of ``combine_kernel``, so that nine fit on an SM; its warps, and states loaded ahead
ROWS = {64: 16, 128: 8}
WARPS, STAGES = 4, 4


@triton.jit
def nothing(ROWS: tl.constexpr, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Make the state of no keys."""
    top = tl.full((ROWS,), LOWEST, tl.float32)
    return top, tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS, D), tl.float32)


@triton.jit
def combine(top, total, acc, chunk_top, chunk_total, chunk_acc):  # type: ignore[no-untyped-def]
    """Add the state of the next chunk to that of all chunks before it."""
    new = tl.maximum(top, chunk_top)
    kept = tl.exp2(top - new)
    added = tl.exp2(chunk_top - new)
    total = tl.fma(total, kept, chunk_total * added)
    acc = tl.fma(acc, tl.broadcast_to(kept[:, None], acc.shape), chunk_acc * added[:, None])
    return new, total, acc


@triton.jit
def finish(out, lse, at, valid, top, total, acc, D: tl.constexpr, HARDWARE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store a row's result, BF16, and its log-sum-exp. ``at`` counts rows of ``out``. A zero loses its sign."""
    d = tl.arange(0, D)
    result = acc * tl.math.div_rn(1.0, total)[:, None]
    result = tl.where(result == 0.0, 0.0, result)
    tl.store(out + at[:, None] * D + d[None, :], narrowed(result, HARDWARE), mask=valid[:, None])
    tl.store(lse + at, (top + tl.math.log2(total)) * 0.6931471805599453, mask=valid)


@triton.jit(do_not_specialize=["R", "T"])  # one binary for every number of requests and tokens
def combine_kernel(  # type: ignore[no-untyped-def]
    sums, ends, out, lse, starts, lengths, R, T,
    KH: tl.constexpr, PER: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr,
    HARDWARE: tl.constexpr,
):  # fmt: skip
    """Add the stored states of a row's chunks: sums [chunks, T, KH * PER, D] and ends [chunks, T, KH * PER, 2] (m, l)."""
    block, kh = tl.program_id(0), tl.program_id(1)
    r, start, queries, begin = block_of(block, starts, R, PER, ROWS)
    if begin >= queries * PER:
        return
    valid, token, head = rows_from(begin, queries, kh, PER, ROWS)
    d = tl.arange(0, D)
    last = (tl.load(lengths + r) - queries + token) // CHUNK  # the last chunk that a row sees
    at = (start + token).to(tl.int64) * (KH * PER) + head
    top, total, acc = nothing(ROWS, D)
    for chunk in tl.range(0, tl.max(last, 0) + 1, num_stages=STAGES):
        stored = (chunk * T).to(tl.int64) * (KH * PER) + at
        seen = valid & (chunk <= last)
        chunk_top = tl.load(ends + stored * 2, mask=seen, other=LOWEST)
        chunk_total = tl.load(ends + stored * 2 + 1, mask=seen, other=0.0)
        chunk_acc = tl.load(sums + stored[:, None] * D + d[None, :], mask=seen[:, None], other=0.0)
        top, total, acc = combine(top, total, acc, chunk_top, chunk_total, chunk_acc)
    finish(out, lse, at, valid, top, total, acc, D, HARDWARE)


def chunks_of(context: int) -> int:
    """Number of chunks in a context of this many keys."""
    return -(-context // CHUNK)


def workspace_bytes(tokens: int, heads: int, width: int, context: int) -> int:
    """Bytes of the stored states of ``tokens`` queries whose contexts have at most ``context`` keys."""
    return 4 * chunks_of(context) * tokens * heads * (width + 2)


def splits(programs: int, tokens: int, heads: int, width: int, context: int) -> int:
    """Number of programs that share the chunks of a row where ``programs`` do without; 1: none is stored.

    Depends on shapes alone, so that a CUDA graph holds it. ``context`` is the longest that the block table has room for.
    """
    if workspace_bytes(tokens, heads, width, context) > WORKSPACE:
        return 1
    return max(1, min(chunks_of(context), PROGRAMS // programs))


def workspace(q_THD: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Allocate ``sums`` and ``ends`` for the queries. A row's chunks that it does not see are not read."""
    shape = (chunks_of(context), *q_THD.shape)
    sums = torch.empty(shape, dtype=torch.float32, device=q_THD.device)
    return sums, torch.empty(*shape[:3], 2, dtype=torch.float32, device=q_THD.device)


def combine_chunks(sums: Tensor, ends: Tensor, out: Tensor, lse: Tensor, starts: Tensor, lengths: Tensor, kv_heads: int) -> None:
    """Fill ``out`` [T, H, D] and ``lse`` [T, H] from the workspace that the attention kernel has filled."""
    T, H, D = out.shape
    per, sequences = H // kv_heads, starts.shape[0] - 1
    combine_kernel[(row_blocks(T, per, sequences, ROWS[D]), kv_heads)](
        sums, ends, out, lse, starts, lengths, sequences, T,
        KH=kv_heads, PER=per, D=D, ROWS=ROWS[D], CHUNK=CHUNK, STAGES=STAGES, HARDWARE=not triton.knobs.runtime.interpret,
        num_warps=WARPS, num_stages=STAGES, **PINNED,
    )  # fmt: skip


def _specs() -> tuple[Spec, ...]:
    types = {"sums": "*fp32", "ends": "*fp32", "out": "*bf16", "lse": "*fp32", "starts": "*i32", "lengths": "*i32"}
    fixed = {"KH": 4, "PER": 7, "CHUNK": CHUNK, "STAGES": STAGES, "HARDWARE": True}
    options = {"num_warps": WARPS, "num_stages": STAGES, **PINNED}
    return tuple(
        Spec(
            f"attention_combine_{D}", combine_kernel, types | {"R": "i32", "T": "i32"},
            {**fixed, "D": D, "ROWS": ROWS[D]}, options,
        )
        for D in HEAD_DIMS
    )  # fmt: skip


KERNELS: tuple[Spec, ...] = _specs()
