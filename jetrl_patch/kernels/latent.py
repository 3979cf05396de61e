"""Latent attention in its absorbed form (``exact.latent``): one key/value head, whose values are the first L numbers of its keys.

The rules of ``attention`` hold, with its rows, chunks and masks: decode steps, prefills and training run one kernel. A key is
L + R wide, which is no power of two, so its latent and its rotated part are two operands.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl_patch.errors import ModelError, explain
from jetrl_patch.kernels.attention import (
    CHUNK,
    LOG2E,
    block_of,
    combine,
    combine_chunks,
    finish,
    narrowed,
    nothing,
    row_blocks,
    rows_from,
    splits,
    weigh,
    workspace,
)
from jetrl_patch.kernels.attention_backward import SUMMED, row_sums_kernel
from jetrl_patch.kernels.attention_backward import WARPS as SUM_WARPS
from jetrl_patch.kernels.gemm_common import PINNED, check_device, rounded


class Tile(NamedTuple):
    """Rows or keys that a program holds, keys or rows that it walks over, pipeline stages and warps."""

    held: int
    walked: int
    stages: int
    warps: int


#: columns of the latent that a program sums: more do not fit into its registers. Each program computes the scores again
PART, BACK_PART = 256, 128
#: two warpgroups share 64 rows, as for heads of 256 (``attention.TILES``): each computes all scores, and half of the sum
TILE = Tile(64, 32, 2, 8)
DQ = Tile(64, 16, 2, 8)
DKEYS = Tile(64, 16, 2, 8)
#: widths of a latent and of a rotated part
LATENTS, ROTATED = (64, 128, 256, 512), (16, 32, 64, 128)
#: rows, columns and inner numbers of a tile of the products by head
PRODUCT, PRODUCT_STAGES, PRODUCT_WARPS = (64, 64, 64), 3, 4


def check_widths(latent: int, width: int) -> None:
    """Raise ModelError for a latent, or for keys of this whole ``width``, without a kernel."""
    if latent not in LATENTS or width - latent not in ROTATED:
        required = f"latents of {', '.join(map(str, LATENTS))} and a rotated part of {', '.join(map(str, ROTATED))}"
        what, fix = "align='exact' on CUDA, latent attention", "use align='linear'"
        raise ModelError(explain(what, required=required, found=f"{latent} and {width - latent}", fix=fix))


# ---- Attention -------------------------------------------------------------------------------------

@triton.jit
def halves(at, there, L: tl.constexpr, R: tl.constexpr):  # type: ignore[no-untyped-def]
    """The latents [rows, L] and the rotated parts [rows, R] of the rows at these pointers, zero unless ``there``."""
    latent = tl.load(at[:, None] + tl.arange(0, L)[None, :], mask=there[:, None], other=0.0)
    return latent, tl.load(at[:, None] + L + tl.arange(0, R)[None, :], mask=there[:, None], other=0.0)


@triton.jit(do_not_specialize=["REQUESTS", "T"])  # one binary for every number of requests and tokens
def latent_kernel(  # type: ignore[no-untyped-def]
    q, keys, out, lse, starts, lengths, table, REQUESTS, T, scale, k_b, k_t, table_r,
    PER: tl.constexpr, L: tl.constexpr, R: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    CHUNK: tl.constexpr, STAGES: tl.constexpr, SIZE: tl.constexpr, SPLIT: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """As ``attention.attention_kernel`` for q [T, PER, L + R], with the parts of a value on axis 1."""
    r, start, queries, begin = block_of(tl.program_id(0), starts, REQUESTS, PER, ROWS)
    if begin >= queries * PER:
        return
    if SIZE == 0:
        length = queries
    else:
        length = tl.load(lengths + r)
    last = length - queries + (tl.minimum(begin + ROWS, queries * PER) - 1) // PER  # the last key that a row of the tile sees
    if tl.program_id(2) * CHUNK > last:
        return
    valid, token, head = rows_from(begin, queries, 0, PER, ROWS)
    limit = length - queries + token  # the last key that a row sees
    out_at = (start + token).to(tl.int64) * PER + head
    q_latent, q_rotated = halves(q + out_at * (L + R), valid, L, R)
    d = tl.program_id(1) * PART + tl.arange(0, PART)
    top, total, acc = nothing(ROWS, PART)
    for chunk in range(tl.program_id(2), last // CHUNK + 1, tl.num_programs(2)):
        chunk_top, chunk_total, chunk_acc = nothing(ROWS, PART)
        first = chunk * (CHUNK // KEYS)
        for kb in tl.range(first, tl.minimum(first + CHUNK // KEYS, last // KEYS + 1), num_stages=STAGES):
            key = kb * KEYS + tl.arange(0, KEYS)
            there = key < length
            if SIZE == 0:
                at = (start + key).to(tl.int64) * k_t
            else:
                page = tl.load(table + r.to(tl.int64) * table_r + key // SIZE, mask=there, other=0).to(tl.int64)
                at = page * k_b + (key % SIZE) * k_t
            latent, rotated = halves(keys + at, there, L, R)
            s = tl.dot(q_rotated, tl.trans(rotated), tl.dot(q_latent, tl.trans(latent))) * scale
            value = tl.load(keys + at[:, None] + d[None, :], mask=there[:, None], other=0.0)
            chunk_top, chunk_total, chunk_acc = weigh(
                s, value, key, limit, chunk_top, chunk_total, chunk_acc, True, HARDWARE
            )
        if SPLIT:
            stored = (chunk * T).to(tl.int64) * PER + out_at
            tl.store(out + stored[:, None] * L + d[None, :], chunk_acc, mask=valid[:, None])
            tl.store(lse + stored * 2, chunk_top, mask=valid)
            tl.store(lse + stored * 2 + 1, chunk_total, mask=valid)
        else:
            top, total, acc = combine(top, total, acc, chunk_top, chunk_total, chunk_acc)
    if not SPLIT:
        finish(out, lse, out_at, valid, top, total, acc, d, L, HARDWARE)


def attention_paged(
    q_THD: Tensor, keys: Tensor, latent: int, block_table: Tensor, seq_lens: Tensor, query_start: Tensor, scale: float,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Over a cache BF16 [blocks, block size, 1, L + R], whose values are its first L = ``latent`` numbers.

    Returns BF16 [T, H, L] and the log-sum-exp FP32 [T, H]. The host does not wait for the GPU.
    """
    ends, size = (query_start, seq_lens, block_table), keys.shape[1]
    return _launch(q_THD, keys, latent, (keys.stride(0), keys.stride(1)), ends, scale, size, out)


def attention_varlen(q_THD: Tensor, k_TKD: Tensor, latent: int, cu_seqlens: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The same over packed sequences and their keys [T, 1, L + R]."""
    return _launch(q_THD, k_TKD, latent, (0, k_TKD.stride(0)), (cu_seqlens,) * 3, scale)


def _launch(
    q: Tensor, keys: Tensor, latent: int, strides: tuple[int, int], ends: tuple[Tensor, Tensor, Tensor], scale: float,
    size: int = 0, out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    T, H, D = q.shape
    check_widths(latent, D)
    if {q.dtype, keys.dtype} != {torch.bfloat16} or keys.shape[-2:] != (1, D) or keys.stride(-1) != 1:
        required = f"BF16 queries and keys [..., 1, {D}] with a contiguous last dimension"
        found = f"{q.dtype} {list(q.shape)} and {keys.dtype} {list(keys.shape)}"
        raise ValueError(explain("latent attention", required=required, found=found, fix="convert them first"))
    q, (starts, lengths, table) = q.contiguous(), (t if t.stride(-1) == 1 else t.contiguous() for t in ends)
    check_device(q, keys, starts, lengths, table)
    out = torch.empty(T, H, latent, dtype=torch.bfloat16, device=q.device) if out is None else out
    lse = torch.empty(T, H, dtype=torch.float32, device=q.device)
    sequences = starts.shape[0] - 1
    if not T or not sequences:
        return out, lse
    blocks, context = row_blocks(T, H, sequences, TILE.held), table.shape[1] * size if size else 0
    part = min(PART, latent)
    shared = splits(blocks * (latent // part), T, H, latent, context)
    into = (out, lse) if shared == 1 else workspace(out, context)
    latent_kernel[(blocks, latent // part, shared)](
        q, keys, *into, starts, lengths, table, sequences, T, scale * LOG2E, *strides, table.stride(0) if size else 0,
        PER=H, L=latent, R=D - latent, PART=part, ROWS=TILE.held, KEYS=TILE.walked, CHUNK=CHUNK, STAGES=TILE.stages, SIZE=size,
        SPLIT=shared > 1, HARDWARE=not triton.knobs.runtime.interpret, num_warps=TILE.warps, num_stages=TILE.stages, **PINNED,
    )  # fmt: skip
    if shared > 1:
        combine_chunks(*into, out, lse, starts, lengths, 1)
    return out, lse


# ---- Its gradient, as in ``attention_backward``. A key's latent gets the gradients of the key and of the value

@triton.jit(do_not_specialize=["REQUESTS", "T"])
def dq_kernel(  # type: ignore[no-untyped-def]
    q, keys, grad, level, delta, dq, starts, REQUESTS, T, scale, natural,
    PER: tl.constexpr, L: tl.constexpr, R: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    STAGES: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """``level`` and ``delta`` are [1, T * PER], other tensors contiguous. ``scale`` is ``natural`` * log2(e)."""
    _, start, tokens, begin = block_of(tl.program_id(0), starts, REQUESTS, PER, ROWS)
    if begin >= tokens * PER:
        return
    valid, token, head = rows_from(begin, tokens, 0, PER, ROWS)
    at = (start + token).to(tl.int64) * PER + head
    q_latent, q_rotated = halves(q + at * (L + R), valid, L, R)
    g = tl.load(grad + at[:, None] * L + tl.arange(0, L)[None, :], mask=valid[:, None], other=0.0)
    levels, mean = tl.load(level + at, mask=valid, other=0.0), tl.load(delta + at, mask=valid, other=0.0)
    d = tl.program_id(1) * PART + tl.arange(0, PART)
    d_latent, d_rotated = tl.zeros((ROWS, PART), tl.float32), tl.zeros((ROWS, R), tl.float32)
    for kb in tl.range(0, (tl.minimum(begin + ROWS, tokens * PER) - 1) // PER // KEYS + 1, num_stages=STAGES):
        key = kb * KEYS + tl.arange(0, KEYS)
        key_at = keys + (start + key).to(tl.int64) * (L + R)
        latent, rotated = halves(key_at, key < tokens, L, R)
        s = tl.dot(q_rotated, tl.trans(rotated), tl.dot(q_latent, tl.trans(latent))) * scale
        p = tl.where(key[None, :] <= token[:, None], tl.exp2(s - levels[:, None]), 0.0)
        ds = narrowed(p * (tl.dot(g, tl.trans(latent)) - mean[:, None]), HARDWARE)
        d_latent = tl.dot(ds, tl.load(key_at[:, None] + d[None, :], mask=(key < tokens)[:, None], other=0.0), d_latent)
        d_rotated = tl.dot(ds, rotated, d_rotated)
    to = dq + at[:, None] * (L + R)
    tl.store(to + d[None, :], narrowed(d_latent * natural, HARDWARE), mask=valid[:, None])
    if tl.program_id(1) == 0:
        tl.store(to + L + tl.arange(0, R)[None, :], narrowed(d_rotated * natural, HARDWARE), mask=valid[:, None])


@triton.jit(do_not_specialize=["REQUESTS", "T"])
def dkeys_kernel(  # type: ignore[no-untyped-def]
    q, keys, grad, level, delta, dkeys, starts, REQUESTS, T, scale, natural,
    PER: tl.constexpr, L: tl.constexpr, R: tl.constexpr, PART: tl.constexpr, HELD: tl.constexpr, ROWS: tl.constexpr,
    STAGES: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Hold keys, and loop over the rows of all heads that see one of them."""
    _, start, tokens, begin = block_of(tl.program_id(0), starts, REQUESTS, 1, HELD)
    if begin >= tokens:
        return
    key = begin + tl.arange(0, HELD)
    key_at = (start + key).to(tl.int64) * (L + R)
    latent, rotated = halves(keys + key_at, key < tokens, L, R)
    d = tl.program_id(1) * PART + tl.arange(0, PART)
    d_latent, d_rotated = tl.zeros((HELD, PART), tl.float32), tl.zeros((HELD, R), tl.float32)
    for rb in tl.range(begin * PER // ROWS, tl.cdiv(tokens * PER, ROWS), num_stages=STAGES):
        row = rb * ROWS + tl.arange(0, ROWS)
        valid, at = row < tokens * PER, start.to(tl.int64) * PER + row
        q_at, g_at = q + at * (L + R), grad + at * L
        q_latent, q_rotated = halves(q_at, valid, L, R)
        g = tl.load(g_at[:, None] + tl.arange(0, L)[None, :], mask=valid[:, None], other=0.0)
        levels, mean = tl.load(level + at, mask=valid, other=0.0), tl.load(delta + at, mask=valid, other=0.0)
        s = tl.dot(rotated, tl.trans(q_rotated), tl.dot(latent, tl.trans(q_latent))) * scale
        p = tl.where((key[:, None] <= (row // PER)[None, :]) & valid[None, :], tl.exp2(s - levels[None, :]), 0.0)
        ds = narrowed(p * (tl.dot(latent, tl.trans(g)) - mean[None, :]) * natural, HARDWARE)
        g_part = tl.load(g_at[:, None] + d[None, :], mask=valid[:, None], other=0.0)
        q_part = tl.load(q_at[:, None] + d[None, :], mask=valid[:, None], other=0.0)
        d_latent = tl.dot(ds, q_part, tl.dot(narrowed(p, HARDWARE), g_part, d_latent))
        d_rotated = tl.dot(ds, q_rotated, d_rotated)
    there = (key < tokens)[:, None]
    to = dkeys + key_at[:, None]
    tl.store(to + d[None, :], narrowed(d_latent, HARDWARE), mask=there)
    if tl.program_id(1) == 0:
        tl.store(to + L + tl.arange(0, R)[None, :], narrowed(d_rotated, HARDWARE), mask=there)


def attention_backward(
    q: Tensor, keys: Tensor, out: Tensor, lse: Tensor, grad: Tensor, cu_seqlens: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Return BF16 dQ [T, H, L + R] and the gradient of the keys [T, 1, L + R] in both of their roles."""
    q, keys, out, grad = (t.contiguous() for t in (q, keys, out, grad))
    (T, H, D), latent, sequences = q.shape, out.shape[2], cu_seqlens.shape[0] - 1
    check_widths(latent, D)
    check_device(q, keys, out, lse, grad, cu_seqlens)
    dq, dkeys = torch.empty_like(q), torch.empty_like(keys)
    if T and sequences:
        hardware = not triton.knobs.runtime.interpret
        delta, level = (torch.empty(1, T * H, dtype=torch.float32, device=q.device) for _ in range(2))
        row_sums_kernel[(-(-T * H // SUMMED),)](
            grad, out, lse, delta, level, T, KH=1, PER=H, D=latent, SUMMED=SUMMED, HARDWARE=hardware, num_warps=SUM_WARPS,
            **PINNED,
        )  # fmt: skip
        given = (cu_seqlens, sequences, T, scale * LOG2E, scale)
        part = min(BACK_PART, latent)
        fixed = {"PER": H, "L": latent, "R": D - latent, "PART": part, "HARDWARE": hardware, **PINNED}
        dq_kernel[(row_blocks(T, H, sequences, DQ.held), latent // part)](
            q, keys, grad, level, delta, dq, *given, ROWS=DQ.held, KEYS=DQ.walked, STAGES=DQ.stages, num_warps=DQ.warps,
            num_stages=DQ.stages, **fixed,
        )  # fmt: skip
        dkeys_kernel[(row_blocks(T, 1, sequences, DKEYS.held), latent // part)](
            q, keys, grad, level, delta, dkeys, *given, HELD=DKEYS.held, ROWS=DKEYS.walked, STAGES=DKEYS.stages,
            num_warps=DKEYS.warps, num_stages=DKEYS.stages, **fixed,
        )  # fmt: skip
    return dq, dkeys


# ---- Y = bf16(X W^T) for each head: x [T, H, K], w [H, N, K] -> [T, H, N] -----------------------------

@triton.jit(do_not_specialize=["T"])  # one binary for every batch
def product_kernel(  # type: ignore[no-untyped-def]
    x, w, y, T, x_t, x_h, w_h, w_n, w_k,
    H: tl.constexpr, N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
    STAGES: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """One tile for any number of tokens; ascending k. W may be a transposed view."""
    t, h = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.program_id(2).to(tl.int64)
    n, inner = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, INNER)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in tl.range(0, K, INNER, num_stages=STAGES):
        k = first + inner
        x_at, w_at = x + h * x_h + t[:, None] * x_t + k[None, :], w + h * w_h + n[:, None] * w_n + k[None, :] * w_k
        rows = tl.load(x_at, mask=(t < T)[:, None] & (k < K)[None, :], other=0.0)
        total = tl.dot(rows, tl.trans(tl.load(w_at, mask=(n < N)[:, None] & (k < K)[None, :], other=0.0)), total)
    tl.store(y + (t[:, None] * H + h) * N + n[None, :], rounded(total), mask=(t < T)[:, None] & (n < N)[None, :])


def product_by_head(x_THK: Tensor, w_HNK: Tensor) -> Tensor:
    """BF16 [T, H, N] from BF16 x with contiguous rows, and a BF16 weight with any strides."""
    (T, H, K), N = x_THK.shape, w_HNK.shape[1]
    x_THK = x_THK if x_THK.stride(2) == 1 else x_THK.contiguous()
    check_device(x_THK, w_HNK)
    y = torch.empty(T, H, N, dtype=torch.bfloat16, device=x_THK.device)
    if T:
        rows, columns, inner = PRODUCT
        product_kernel[(-(-T // rows), -(-N // columns), H)](
            x_THK, w_HNK, y, T, *x_THK.stride()[:2], *w_HNK.stride(), H=H, N=N, K=K, ROWS=rows, COLUMNS=columns, INNER=inner,
            STAGES=PRODUCT_STAGES, HARDWARE=not triton.knobs.runtime.interpret, num_warps=PRODUCT_WARPS,
            num_stages=PRODUCT_STAGES, **PINNED,
        )  # fmt: skip
    return y
