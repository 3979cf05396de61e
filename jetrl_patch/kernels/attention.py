"""Batch-invariant causal attention: a row depends only on its own query and keys. One kernel for paged and packed sequences.

A program computes ROWS rows of one key/value head. It reads the keys in ascending blocks of KEYS and starts a new sum at each
multiple of CHUNK, so several programs can share a context. Decode, chunked prefill and training use the same tile, so the same
instructions compute a row everywhere.

A tile also reads blocks of keys that only its later rows may see. They leave the state of an earlier row unchanged, bit for bit:
its scores are -inf, so the maximum stays, the factor is exp2(0) = 1, the weights are exp2(-inf) = 0, the product with the values
starts from a fresh zero and is 0, and fma(x, 1, 0) = x. (Only the sign of a zero could differ, so zero results lose their sign. A
NaN or Inf among the values of a later token in the same block would produce NaN.)
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl_patch.errors import ModelError, explain
from jetrl_patch.kernels.common import decode
from jetrl_patch.kernels.gemm_common import PINNED, check_device, rounded

LOG2E = math.log2(math.e)


# ---- The rows that a program computes, in all attention kernels ----------------------------------
# A row is one query of one of the PER query heads that share a key/value head. The rows of a sequence are in the order
# (token, head), so a decode step fills a tile as well as it can.

class Tile(NamedTuple):
    """Rows of a program of the forward (at least 64, for ``wgmma``), keys of a block, pipeline depth and warps."""

    rows: int
    keys: int
    stages: int
    warps: int


#: head dimension -> tile, which must not depend on the number of rows, keys or requests. Each warpgroup has 64 rows, so its
#: scores stay in its registers. (With 256, two share 64 rows: each computes all scores, and half of the sum.) A program holds
#: the sum of the current chunk and that of the chunks before it. The second may spill: it is used once per chunk
TILES = {64: Tile(64, 64, 2, 4), 128: Tile(128, 64, 2, 8), 256: Tile(64, 32, 2, 8)}
HEAD_DIMS = tuple(TILES)


@triton.jit
def narrowed(x, HARDWARE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Convert FP32 to BF16, ties to even."""
    if HARDWARE:
        return x.to(tl.bfloat16)
    else:
        return rounded(x)


@triton.jit
def block_of(block, starts, R, PER: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the sequence of a block of rows, the sequence's first token and number of tokens, and the block's first row.

    The blocks of sequence r begin at starts[r] * PER // ROWS + r. So every sequence gets at least as many blocks as it needs, and
    the grid depends only on shapes, not on values. A first row of PER * tokens or more means that the block is empty.
    """
    low = 0
    high = R
    while low < high:
        middle = (low + high) // 2
        if tl.load(starts + middle) * PER // ROWS + middle <= block:
            low = middle + 1
        else:
            high = middle
    r = low - 1
    start = tl.load(starts + r)
    tokens = tl.load(starts + r + 1) - start
    return r, start, tokens, (block - (start * PER // ROWS + r)) * ROWS


@triton.jit
def rows_from(begin, tokens, kh, PER: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return, for the ROWS rows of a sequence from ``begin`` on: whether the row exists, its token and its query head."""
    row = begin + tl.arange(0, ROWS)
    return row < tokens * PER, tl.minimum(row, tokens * PER - 1) // PER, kh * PER + row % PER


def row_blocks(tokens: int, per: int, sequences: int, rows: int) -> int:
    """Number of row blocks that covers any split of ``tokens`` into ``sequences``."""
    return tokens * per // rows + sequences


# ---- Chunks of keys: a row has the same bits however many programs share its context -------------
# The keys of a sequence are cut at multiples of CHUNK, counted from its first key. Each chunk has a state, computed from its keys
# alone:
#
#     m [ROWS]     the largest score        l [ROWS]     the sum of 2^(s - m)        a [ROWS, D]  the sum of 2^(s - m) v
#
# ``combine`` adds the states in ascending order. In training, one program does all of it. In decoding, several programs may
# compute the states and store them in FP32, and ``combine_kernel`` adds them: the same operations on the same values in the same
# order.
#
# The rows of a tile may see different numbers of chunks. For a chunk that a row does not see, a program that does all chunks adds
# the state (LOWEST, 0, 0), and so does ``combine_kernel``, whatever was stored. That changes nothing: the maximum stays, the
# factors are exp2(0) = 1 and 0, and fma(x, 1, 0) = x.

#: keys in a chunk. Trainer and rollout must use the same number, because a new sum begins with each chunk
CHUNK = 1024
#: the maximum of no scores. It is finite, because -inf - -inf is NaN
LOWEST = tl.constexpr(-3.4028234663852886e38)

#: maximum number of programs in a launch that shares contexts: eight times as many as run at a time on a Hopper's 132 SMs, twice
#: that at head dimension 64. Programs without a chunk end at once but cost a little. An estimate; no bit depends on it
PROGRAMS = 8 * 132
#: maximum bytes of stored states. If a launch would need more, one program does all chunks of a row
WORKSPACE = 64 << 20

#: head dimension -> rows per program of ``combine_kernel`` (nine programs fit on an SM); its warps and pipeline stages
COMBINE_ROWS = {64: 16, 128: 8, 256: 4, 512: 2}
COMBINE_WARPS, COMBINE_STAGES = 4, 4


@triton.jit
def nothing(ROWS: tl.constexpr, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the state of an empty set of keys."""
    top = tl.full((ROWS,), LOWEST, tl.float32)
    return top, tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS, D), tl.float32)


@triton.jit
def combine(top, total, acc, chunk_top, chunk_total, chunk_acc):  # type: ignore[no-untyped-def]
    """Add the state of the next chunk to the state of all chunks before it."""
    new = tl.maximum(top, chunk_top)
    kept = tl.exp2(top - new)
    added = tl.exp2(chunk_top - new)
    total = tl.fma(total, kept, chunk_total * added)
    acc = tl.fma(acc, tl.broadcast_to(kept[:, None], acc.shape), chunk_acc * added[:, None])
    return new, total, acc


@triton.jit
def finish(out, lse, at, valid, top, total, acc, d, D: tl.constexpr, HARDWARE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store columns d of a row's result, BF16, and its log-sum-exp. ``at`` counts rows of ``out``. A zero loses its sign."""
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
    finish(out, lse, at, valid, top, total, acc, d, D, HARDWARE)


def chunks_of(context: int) -> int:
    """Number of chunks in a context of this many keys."""
    return -(-context // CHUNK)


def splits(programs: int, tokens: int, heads: int, width: int, context: int) -> int:
    """Number of programs that share the chunks of a row; 1 stores no state. Depends only on shapes, as a CUDA graph needs.

    Args:
        programs: programs in a launch that does not share contexts.
        context: the longest context that the block table has room for.
    """
    stored_bytes = 4 * chunks_of(context) * tokens * heads * (width + 2)
    most = PROGRAMS * (2 if width == 64 else 1)
    return 1 if stored_bytes > WORKSPACE else max(1, min(chunks_of(context), most // programs))


def workspace(out_THD: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Allocate ``sums`` and ``ends`` for a result. ``combine_kernel`` does not read the chunks that a row does not see."""
    shape = (chunks_of(context), *out_THD.shape)
    sums = torch.empty(shape, dtype=torch.float32, device=out_THD.device)
    return sums, torch.empty(*shape[:3], 2, dtype=torch.float32, device=out_THD.device)


def combine_chunks(sums: Tensor, ends: Tensor, out: Tensor, lse: Tensor, starts: Tensor, lengths: Tensor, kv_heads: int) -> None:
    """Compute ``out`` [T, H, D] and ``lse`` [T, H] from the states that the attention kernel has stored."""
    T, H, D = out.shape
    per, sequences = H // kv_heads, starts.shape[0] - 1
    combine_kernel[(row_blocks(T, per, sequences, COMBINE_ROWS[D]), kv_heads)](
        sums, ends, out, lse, starts, lengths, sequences, T,
        KH=kv_heads, PER=per, D=D, ROWS=COMBINE_ROWS[D], CHUNK=CHUNK, STAGES=COMBINE_STAGES,
        HARDWARE=not triton.knobs.runtime.interpret, num_warps=COMBINE_WARPS, num_stages=COMBINE_STAGES, **PINNED,
    )  # fmt: skip


# ---- The forward pass ----------------------------------------------------------------------------

@triton.jit
def attend(q, k, v, key, limit, scale, top, total, acc, MASKED: tl.constexpr, HARDWARE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Process one block of keys."""
    return weigh(tl.dot(q, tl.trans(k)) * scale, v, key, limit, top, total, acc, MASKED, HARDWARE)


@triton.jit
def weigh(s, v, key, limit, top, total, acc, MASKED: tl.constexpr, HARDWARE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add a block from its scores: online softmax (arXiv 2205.14135) in base 2. The product with V starts from a fresh zero.

    Without MASKED, every row must see every key of the block. A mask would then give the same bits.
    """
    if MASKED:
        s = tl.where(key[None, :] <= limit[:, None], s, float("-inf"))
    new = tl.maximum(top, tl.max(s, 1))
    p = tl.exp2(s - new[:, None])
    alpha = tl.exp2(top - new)
    total = tl.fma(total, alpha, tl.sum(p, 1))
    acc = tl.fma(acc, tl.broadcast_to(alpha[:, None], acc.shape), tl.dot(narrowed(p, HARDWARE), v))
    return new, total, acc


@triton.jit
def block_of_keys(  # type: ignore[no-untyped-def]
    kb, k, v, k_s, v_s, r, start, length, table, k_b, k_t, k_h, s_b, table_r, kh,
    KH: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, FP8: tl.constexpr, MASKED: tl.constexpr,
    HARDWARE: tl.constexpr,
):  # fmt: skip
    """Load one block of a paged or a packed sequence: the positions of the keys, keys [KEYS, D] and values [KEYS, D].

    With MASKED, the block may extend past the context and reads zeros there. With FP8, the cache holds bytes, and scales that are
    powers of two, so their products are exact in BF16.
    """
    key, d = kb * KEYS + tl.arange(0, KEYS), tl.arange(0, D)
    there = key < length if MASKED else tl.full((KEYS,), True, tl.int1)
    if SIZE == 0:
        at = (start + key).to(tl.int64) * k_t + kh * k_h
    else:
        page = tl.load(table + r.to(tl.int64) * table_r + key // SIZE, mask=there, other=0).to(tl.int64)
        at = page * k_b + (key % SIZE) * k_t + kh * k_h
    k_rows = tl.load(k + at[:, None] + d[None, :], mask=there[:, None], other=0.0)
    v_rows = tl.load(v + at[:, None] + d[None, :], mask=there[:, None], other=0.0)
    if FP8:
        scale_at = page * s_b + (key % SIZE) * KH + kh
        k_scale, v_scale = tl.load(k_s + scale_at, mask=there, other=0.0), tl.load(v_s + scale_at, mask=there, other=0.0)
        k_rows = narrowed(decode(k_rows, HARDWARE) * k_scale[:, None], HARDWARE)
        v_rows = narrowed(decode(v_rows, HARDWARE) * v_scale[:, None], HARDWARE)
    return key, k_rows, v_rows


@triton.jit(do_not_specialize=["R", "T"])  # one binary for every number of requests and tokens
def attention_kernel(  # type: ignore[no-untyped-def]
    q, k, v, k_s, v_s, out, lse, starts, lengths, table, R, T, scale, q_t, k_b, k_t, k_h, s_b, table_r,
    KH: tl.constexpr, PER: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, CHUNK: tl.constexpr,
    STAGES: tl.constexpr, SIZE: tl.constexpr, FP8: tl.constexpr, SPLIT: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Of n programs on axis 2, program i does the chunks i, i + n, i + 2n, ... of the keys.

    SIZE is the number of tokens per cache block. With 0, sequences are packed, and their keys are laid out like their queries.
    With SPLIT, ``out`` and ``lse`` are the ``sums`` and ``ends`` of ``combine_kernel``. Without it, one program does all chunks.
    """
    tl.static_assert(CHUNK % KEYS == 0)
    block, kh = tl.program_id(0), tl.program_id(1)
    r, start, queries, begin = block_of(block, starts, R, PER, ROWS)
    if begin >= queries * PER:
        return
    if SIZE == 0:
        length = queries
    else:
        length = tl.load(lengths + r)
    last = length - queries + (tl.minimum(begin + ROWS, queries * PER) - 1) // PER  # the last key that a row of the tile sees
    if tl.program_id(2) * CHUNK > last:
        return
    valid, token, head = rows_from(begin, queries, kh, PER, ROWS)
    d = tl.arange(0, D)
    limit = length - queries + token  # the last key that a row sees
    token_at = (start + token).to(tl.int64)
    q_at = q + token_at[:, None] * q_t + head[:, None] * D + d[None, :]
    q_rows = tl.load(q_at, mask=valid[:, None], other=0.0)
    out_at = token_at * (KH * PER) + head
    top, total, acc = nothing(ROWS, D)
    for chunk in range(tl.program_id(2), last // CHUNK + 1, tl.num_programs(2)):
        chunk_top, chunk_total, chunk_acc = nothing(ROWS, D)
        first = chunk * (CHUNK // KEYS)
        end = tl.minimum(first + CHUNK // KEYS, last // KEYS + 1)
        masked = tl.maximum(first, tl.minimum(end, (length - queries + begin // PER + 1) // KEYS))
        for kb in tl.range(first, masked, num_stages=STAGES):
            key, k_rows, v_rows = block_of_keys(
                kb, k, v, k_s, v_s, r, start, length, table, k_b, k_t, k_h, s_b, table_r, kh,
                KH, KEYS, D, SIZE, FP8, False, HARDWARE,
            )
            chunk_top, chunk_total, chunk_acc = attend(
                q_rows, k_rows, v_rows, key, limit, scale, chunk_top, chunk_total, chunk_acc, False, HARDWARE
            )
        for kb in tl.range(masked, end, num_stages=STAGES):
            key, k_rows, v_rows = block_of_keys(
                kb, k, v, k_s, v_s, r, start, length, table, k_b, k_t, k_h, s_b, table_r, kh,
                KH, KEYS, D, SIZE, FP8, True, HARDWARE,
            )
            chunk_top, chunk_total, chunk_acc = attend(
                q_rows, k_rows, v_rows, key, limit, scale, chunk_top, chunk_total, chunk_acc, True, HARDWARE
            )
        if SPLIT:
            stored = (chunk * T).to(tl.int64) * (KH * PER) + out_at
            tl.store(out + stored[:, None] * D + d[None, :], chunk_acc, mask=valid[:, None])
            tl.store(lse + stored * 2, chunk_top, mask=valid)
            tl.store(lse + stored * 2 + 1, chunk_total, mask=valid)
        else:
            top, total, acc = combine(top, total, acc, chunk_top, chunk_total, chunk_acc)
    if not SPLIT:
        finish(out, lse, out_at, valid, top, total, acc, d, D, HARDWARE)


def attention_paged(
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start: Tensor,
    scale: float,
    out: Tensor | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """As ``exact.attention.attention_paged``, and the log-sum-exp [T, H]. The host does not wait for the GPU."""
    k_scale, v_scale = scales or (k_cache, v_cache)  # without scales, not read
    if scales is not None and k_scale.stride() != (v_scale.stride(0), k_cache.shape[2], 1):
        raise ValueError("the scales of the cache must have the same strides and contiguous blocks")
    if k_cache.stride() != v_cache.stride() or k_cache.stride(3) != 1:
        raise ValueError("k_cache and v_cache must have the same strides and a contiguous last dimension")
    ends = (("query_start", query_start), ("seq_lens", seq_lens), ("block_table", block_table))
    strides = (*k_cache.stride()[:3], k_scale.stride(0))
    kv = (k_cache, v_cache, k_scale, v_scale)
    return _launch(q_THD, kv, strides, ends, scale, k_cache.shape[1], out, fp8=scales is not None)


def attention_varlen(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, cu_seqlens: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention over packed sequences. Returns BF16 [T, H, D] and the log-sum-exp FP32 [T, H]."""
    if k_TKD.stride() != v_TKD.stride() or k_TKD.stride(2) != 1:
        k_TKD, v_TKD = k_TKD.contiguous(), v_TKD.contiguous()
    strides = (0, k_TKD.stride(0), k_TKD.stride(1), 0)
    return _launch(q_THD, (k_TKD, v_TKD, k_TKD, v_TKD), strides, (("cu_seqlens", cu_seqlens),) * 3, scale)


def _launch(
    q: Tensor, kv: tuple[Tensor, ...], strides: tuple[int, ...], ends: tuple[tuple[str, Tensor], ...], scale: float,
    size: int = 0, out: Tensor | None = None, fp8: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``ends`` are starts, lengths and table, with their names. Raises TypeError, ValueError, ModelError."""
    (T, H, D), (k, v, *_), stored = q.shape, kv, torch.uint8 if fp8 else torch.bfloat16
    wanted = (("q", q, torch.bfloat16), ("k", k, stored), ("v", v, stored), *((*end, torch.int32) for end in ends))
    for name, t, dtype in wanted:
        if t.dtype != dtype:
            raise TypeError(explain(f"attention {name}", required=dtype, found=t.dtype, fix="convert it first"))
    kv_heads = k.shape[-2]
    if k.shape != v.shape or k.shape[-1] != D or H % kv_heads:
        raise ValueError(f"attention: the shapes of q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} do not match")
    check_head_dim(D)
    if q.stride(2) != 1 or q.stride(1) != D:
        q = q.contiguous()
    starts, lengths, table = (t if t.stride(-1) == 1 else t.contiguous() for _, t in ends)
    check_device(q, *kv, starts, lengths, table)
    if out is None:
        out = torch.empty(T, H, D, dtype=torch.bfloat16, device=q.device)
    elif out.shape != q.shape or out.dtype != torch.bfloat16 or not out.is_contiguous():
        raise ValueError(f"attention: out must be contiguous BF16 {[T, H, D]}, found {out.dtype} {list(out.shape)}")
    lse = torch.empty(T, H, dtype=torch.float32, device=q.device)
    tile, sequences = TILES[D], starts.shape[0] - 1
    if not T or not sequences:
        return out, lse
    blocks, context = row_blocks(T, H // kv_heads, sequences, tile.rows), table.shape[1] * size if size else 0
    shared = splits(blocks * kv_heads, T, H, D, context)
    into = (out, lse) if shared == 1 else workspace(out, context)
    attention_kernel[(blocks, kv_heads, shared)](
        q, *kv, *into, starts, lengths, table, sequences, T, scale * LOG2E, q.stride(0), *strides, table.stride(0) if size else 0,
        KH=kv_heads, PER=H // kv_heads, D=D, ROWS=tile.rows, KEYS=tile.keys, CHUNK=CHUNK, STAGES=tile.stages, SIZE=size,
        FP8=fp8, SPLIT=shared > 1, HARDWARE=not triton.knobs.runtime.interpret,
        num_warps=tile.warps, num_stages=tile.stages, **PINNED,
    )  # fmt: skip
    if shared > 1:
        combine_chunks(*into, out, lse, starts, lengths, kv_heads)
    return out, lse


def check_head_dim(width: int) -> None:
    """Raise ModelError for a head dimension without a kernel."""
    if width not in HEAD_DIMS:
        required = f"head dimension {', '.join(map(str, HEAD_DIMS))}"
        raise ModelError(explain("align='exact' on CUDA", required=required, found=width, fix="use align='linear'"))
