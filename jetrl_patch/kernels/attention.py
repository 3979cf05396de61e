"""Batch-invariant causal attention: a row depends only on its own query and keys. One kernel for paged and packed sequences.

A program computes ROWS rows of one key/value head (``attention_rows``). It walks keys in blocks of KEYS, ascending, and begins
anew at each multiple of CHUNK, so that a context may be shared among programs (``attention_chunks``). Decode, chunked prefill
and training use the same tile, so the same instructions compute a row everywhere.

A row also passes through blocks of keys that only later rows of its tile may see. They leave its state unchanged, bit for
bit: its scores are -inf, so the maximum stays, its factor is exp2(0) = 1, its weights are exp2(-inf) = 0, the product with
the values starts from a fresh zero and is 0, and fma(x, 1, 0) = x. (The sign of a zero may differ, so zero results lose it;
a NaN or Inf among the values of a later token in the same block would produce NaN.)
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl_patch.errors import ModelError, explain
from jetrl_patch.kernels import chunks
from jetrl_patch.kernels.aot import Spec
from jetrl_patch.kernels.chunks import (
    HEAD_DIMS,
    TILES,
    block_of,
    combine,
    finish,
    narrowed,
    nothing,
    row_blocks,
    rows_from,
)
from jetrl_patch.kernels.common import load_tile, widened
from jetrl_patch.kernels.formats import groups
from jetrl_patch.kernels.gemm_common import PINNED, check_device, rounded

LOG2E = math.log2(math.e)


@triton.jit
def attend(q, k, v, key, limit, scale, top, total, acc, MASKED: tl.constexpr, HARDWARE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Process one block of keys: online softmax (arXiv 2205.14135) in base 2; the product with V starts from a fresh zero.

    Without MASKED every row sees every key of the block, where a mask would change nothing.
    """
    s = tl.dot(q, tl.trans(k)) * scale
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
    kb, k, v, r, start, length, table, k_b, k_t, k_h, table_r, kh,
    KEYS: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Load keys and values of one block, from pages or packed: the positions of the keys, and both [KEYS, D].

    With MASKED some of the block may lie behind the context: zeros.
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
    return key, k_rows, v_rows


@triton.jit(do_not_specialize=["R", "T"])  # one binary for every number of requests and tokens
def attention_kernel(  # type: ignore[no-untyped-def]
    q, k, v, out, lse, starts, lengths, table, R, T, scale, q_t, k_b, k_t, k_h, table_r,
    KH: tl.constexpr, PER: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, CHUNK: tl.constexpr,
    STAGES: tl.constexpr, SIZE: tl.constexpr, SPLIT: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Do every chunk of keys whose number is the program's on axis 2 plus a multiple of the programs there.

    SIZE is the number of tokens per cache block; 0 means packed sequences, whose keys are laid out like their queries. With
    SPLIT, ``out`` and ``lse`` are the ``sums`` and ``ends`` of ``attention_chunks``; without, one program does all chunks.
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
                kb, k, v, r, start, length, table, k_b, k_t, k_h, table_r, kh, KEYS, D, SIZE, False
            )
            chunk_top, chunk_total, chunk_acc = attend(
                q_rows, k_rows, v_rows, key, limit, scale, chunk_top, chunk_total, chunk_acc, False, HARDWARE
            )
        for kb in tl.range(masked, end, num_stages=STAGES):
            key, k_rows, v_rows = block_of_keys(
                kb, k, v, r, start, length, table, k_b, k_t, k_h, table_r, kh, KEYS, D, SIZE, True
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
        finish(out, lse, out_at, valid, top, total, acc, D, HARDWARE)


def attention_paged(
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start: Tensor,
    scale: float,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As ``exact.attention.attention_paged``, and the log-sum-exp [T, H]. Shapes alone set the grid: no GPU synchronization."""
    heads = _check(q_THD, k_cache, v_cache)
    if k_cache.stride() != v_cache.stride() or k_cache.stride(3) != 1:
        raise ValueError("k_cache and v_cache must have the same strides and a contiguous last dimension")
    block, token, head, _ = k_cache.stride()
    table = _integers("block_table", block_table)
    strides = (block, token, head, table.stride(0))
    ends = (_integers("query_start", query_start), _integers("seq_lens", seq_lens), table)
    return _launch(q_THD, k_cache, v_cache, ends, strides, scale, heads, k_cache.shape[1], out)


def attention_varlen(
    q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, cu_seqlens: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention over packed sequences. Returns BF16 [T, H, D] and the log-sum-exp FP32 [T, H]."""
    heads = _check(q_THD, k_TKD, v_TKD)
    if k_TKD.stride() != v_TKD.stride() or k_TKD.stride(2) != 1:
        k_TKD, v_TKD = k_TKD.contiguous(), v_TKD.contiguous()
    starts = _integers("cu_seqlens", cu_seqlens)
    strides = (0, k_TKD.stride(0), k_TKD.stride(1), 0)
    return _launch(q_THD, k_TKD, v_TKD, (starts, starts, starts), strides, scale, heads, 0)


def _launch(
    q: Tensor, k: Tensor, v: Tensor, ends: tuple[Tensor, Tensor, Tensor], strides: tuple[int, ...], scale: float,
    heads: tuple[int, int], size: int, out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    T, H, D = q.shape
    if q.stride(2) != 1 or q.stride(1) != D:
        q = q.contiguous()
    check_device(q, k, v, *ends)
    if out is None:
        out = torch.empty(T, H, D, dtype=torch.bfloat16, device=q.device)
    elif out.shape != q.shape or out.dtype != torch.bfloat16 or not out.is_contiguous():
        raise ValueError(f"attention: out must be contiguous BF16 {[T, H, D]}, found {out.dtype} {list(out.shape)}")
    lse = torch.empty(T, H, dtype=torch.float32, device=q.device)
    kv_heads, per = heads
    tile = TILES[D]
    starts, lengths, table = ends
    sequences = starts.shape[0] - 1
    if not T or not sequences:
        return out, lse
    blocks = row_blocks(T, per, sequences, tile.rows)
    context = table.shape[1] * size if size else 0
    shared = chunks.splits(blocks * kv_heads, T, H, D, context)
    into = (out, lse) if shared == 1 else chunks.workspace(q, context)
    attention_kernel[(blocks, kv_heads, shared)](
        q, k, v, *into, *ends, sequences, T, scale * LOG2E, q.stride(0), *strides,
        KH=kv_heads, PER=per, D=D, ROWS=tile.rows, KEYS=tile.keys, CHUNK=chunks.CHUNK, STAGES=tile.stages, SIZE=size,
        SPLIT=shared > 1, HARDWARE=not triton.knobs.runtime.interpret, num_warps=tile.warps, num_stages=tile.stages, **PINNED,
    )  # fmt: skip
    if shared > 1:
        chunks.combine_chunks(*into, out, lse, starts, lengths, kv_heads)
    return out, lse


def check_head_dim(width: int) -> None:
    """Raise ModelError for a head dimension without a kernel."""
    if width not in HEAD_DIMS:
        raise ModelError(
            explain(
                "align='exact' on CUDA",
                required=f"head dimension {' or '.join(map(str, HEAD_DIMS))}",
                found=width,
                fix="use align='linear'",
            )
        )


def _check(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, int]:
    """Return (key/value heads, query heads per key/value head). Raises TypeError, ValueError, ModelError."""
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.dtype != torch.bfloat16:
            raise TypeError(explain(f"attention {name}", required="torch.bfloat16", found=t.dtype, fix="convert it first"))
    H, D = q.shape[-2:]
    kv_heads = k.shape[-2]
    if k.shape != v.shape or k.shape[-1] != D or H % kv_heads:
        raise ValueError(f"attention: the shapes of q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} do not match")
    check_head_dim(D)
    return kv_heads, H // kv_heads


def _integers(name: str, t: Tensor) -> Tensor:
    if t.dtype != torch.int32:
        raise TypeError(explain(f"attention {name}", required="torch.int32", found=t.dtype, fix="convert it first"))
    return t if t.stride(-1) == 1 else t.contiguous()


def _specs() -> tuple[Spec, ...]:
    integers = dict.fromkeys(("starts", "lengths", "table"), "*i32") | {"R": "i32", "T": "i32"}
    numbers = integers | {"scale": "fp32"} | dict.fromkeys(("q_t", "k_b", "k_t", "k_h", "table_r"), "i32")
    kinds = {"varlen": (0, False), "paged": (16, False), "split": (16, True)}
    found = []
    for D, (rows, keys, stages, warps) in TILES.items():
        fixed = {"KH": 4, "PER": 7, "D": D, "ROWS": rows, "KEYS": keys, "CHUNK": chunks.CHUNK, "STAGES": stages}
        for kind, (size, split) in kinds.items():
            types = dict.fromkeys(("q", "k", "v"), "*bf16") | {"out": "*fp32" if split else "*bf16", "lse": "*fp32"}
            found.append(
                Spec(
                    f"attention_{kind}_{D}", attention_kernel, types | numbers,
                    {**fixed, "SIZE": size, "SPLIT": split, "HARDWARE": True},
                    {"num_warps": warps, "num_stages": stages, **PINNED}, ("q_t", "k_b", "k_t", "k_h"),
                )
            )  # fmt: skip
    return tuple(found)


ATTENTION_KERNELS = _specs()


# ---- The merged weight of ``fp8.lora``, W' = bf16(W + scaling * Σ_j B_j A_j), in one pass over W -
# Every element is a sum of its own in the order of j, so the tiling affects no bit. Products of BF16 values are exact in FP32:
# the fma rounds once, as the formula does. The last product and sum are two roundings, which is why fusion is off.

#: rows of a tile of 128 columns, and its warps
ROWS, WARPS = 32, 4


@triton.jit
def merge_kernel(  # type: ignore[no-untyped-def]
    w, a, b, y, N, K, R, scaling, ROWS: tl.constexpr, HARDWARE: tl.constexpr
):
    """W and y are [N, K], A [R, K] and B transposed, [R, N]."""
    G = tl.cdiv(K, 128)
    n = (tl.program_id(0) // G) * ROWS + tl.arange(0, ROWS)
    k = (tl.program_id(0) % G) * 128 + tl.arange(0, 128)
    total = tl.zeros([ROWS, 128], tl.float32)
    for j in range(R):
        b_N = widened(tl.load(b + j * N + n, mask=n < N, other=0.0), HARDWARE)
        a_K = widened(tl.load(a + j * K + k, mask=k < K, other=0.0), HARDWARE)
        total = tl.fma(tl.broadcast_to(b_N[:, None], [ROWS, 128]), tl.broadcast_to(a_K[None, :], [ROWS, 128]), total)
    tile = load_tile(w, n, k, N, K, K, HARDWARE) + total * scaling
    tl.store(y + n.to(tl.int64)[:, None] * K + k[None, :], rounded(tile), mask=(n < N)[:, None] & (k < K)[None, :])


def merged_weight(w_NK: Tensor, a_RK: Tensor, b_NR: Tensor, scaling: float) -> Tensor:
    """``fp8.lora.merged_weight`` of BF16 tensors."""
    w, a, b = w_NK.contiguous(), a_RK.contiguous(), b_NR.t().contiguous()
    check_device(w, a, b)
    N, K = w.shape
    y = torch.empty(N, K, dtype=torch.bfloat16, device=w.device)
    merge_kernel[(-(-N // ROWS) * groups(K),)](
        w, a, b, y, N, K, a.shape[0], scaling, ROWS=ROWS, HARDWARE=not triton.knobs.runtime.interpret, num_warps=WARPS, **PINNED
    )
    return y


MERGE_KERNELS = (
    Spec(
        "merge", merge_kernel, dict.fromkeys(("w", "a", "b", "y"), "*bf16")
        | dict.fromkeys(("N", "K", "R"), "i32") | {"scaling": "fp32"},
        {"ROWS": ROWS, "HARDWARE": True}, {"num_warps": WARPS, **PINNED}, ("N", "K"),
    ),
)  # fmt: skip

KERNELS: tuple[Spec, ...] = ATTENTION_KERNELS + MERGE_KERNELS
