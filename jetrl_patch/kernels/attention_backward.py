"""Gradients of the packed causal attention of ``attention.py`` (FlashAttention-2, arXiv 2307.08691, algorithm 2).

    P = exp(scale Q K^T - lse);  dV = P^T dO;  dP = dO V^T;  dS = P (dP - delta);  dQ = scale dS K;  dK = scale dS^T Q

with delta = rowsum(dO * O). The products take BF16 operands (P and dS are rounded) and accumulate in FP32. The rollout has no
gradients, so these only need to be correct. They use no atomics, so they are also deterministic.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl_patch.kernels.attention import LOG2E, block_of, check_head_dim, narrowed, row_blocks, rows_from
from jetrl_patch.kernels.common import widened
from jetrl_patch.kernels.gemm_common import PINNED, check_device


class Tile(NamedTuple):
    """What a program holds in registers and what it loops over. With these sizes, no loop spills."""

    held: int
    walked: int
    warps: int


#: head dimension -> rows held and keys looped over, for dQ
DQ = {64: Tile(64, 64, 4), 128: Tile(128, 64, 8), 256: Tile(64, 32, 8)}
#: head dimension -> keys held and rows looped over, for dK and dV
DKDV = {64: Tile(64, 32, 4), 128: Tile(128, 32, 8), 256: Tile(64, 16, 8)}
STAGES = 2
#: rows per program of ``row_sums_kernel``, and its warps
SUMMED, WARPS = 32, 4


@triton.jit(do_not_specialize=["T"])  # one binary for every batch
def row_sums_kernel(  # type: ignore[no-untyped-def]
    grad, out, lse, delta, level, T,
    KH: tl.constexpr, PER: tl.constexpr, D: tl.constexpr, SUMMED: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Write delta and the log-sum-exp in base 2 (``level``), FP32 [KH, T * PER]: the other kernels read rows in this order.

    A row is one head of one token, contiguous in the input tensors.
    """
    row, rows = tl.program_id(0) * SUMMED + tl.arange(0, SUMMED), T * (KH * PER)
    at = row.to(tl.int64)[:, None] * D + tl.arange(0, D)[None, :]
    valid = row < rows
    g = widened(tl.load(grad + at, mask=valid[:, None], other=0.0), HARDWARE)
    o = widened(tl.load(out + at, mask=valid[:, None], other=0.0), HARDWARE)
    token, head = row // (KH * PER), row % (KH * PER)
    to = (head // PER).to(tl.int64) * T * PER + token * PER + head % PER
    tl.store(delta + to, tl.sum(g * o, 1), mask=valid)
    tl.store(level + to, tl.load(lse + row, mask=valid, other=0.0) * 1.4426950408889634, mask=valid)


@triton.jit
def dq_of(  # type: ignore[no-untyped-def]
    kb, k, v, q_rows, g_rows, levels, mean, acc, token, start, kh, rows, scale,
    KH: tl.constexpr, PER: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Add a block of keys. Without MASKED, every row must see every key of the block."""
    key, d = kb * KEYS + tl.arange(0, KEYS), tl.arange(0, D)
    there = key * PER < rows if MASKED else tl.full((KEYS,), True, tl.int1)
    k_at = ((start + key).to(tl.int64) * KH + kh) * D
    k_rows = tl.load(k + k_at[:, None] + d[None, :], mask=there[:, None], other=0.0)
    v_rows = tl.load(v + k_at[:, None] + d[None, :], mask=there[:, None], other=0.0)
    p = tl.exp2(tl.dot(q_rows, tl.trans(k_rows)) * scale - levels[:, None])
    if MASKED:
        p = tl.where(key[None, :] <= token[:, None], p, 0.0)
    ds = p * (tl.dot(g_rows, tl.trans(v_rows)) - mean[:, None])
    return acc + tl.dot(narrowed(ds, HARDWARE), k_rows)


@triton.jit(do_not_specialize=["R", "T"])  # one binary for every batch
def dq_kernel(  # type: ignore[no-untyped-def]
    q, k, v, grad, level, delta, dq, starts, R, T, scale, natural,
    KH: tl.constexpr, PER: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
    HARDWARE: tl.constexpr,
):  # fmt: skip
    """``level`` and ``delta`` are [KH, T * PER], other tensors contiguous [T, heads, D]. ``scale`` is ``natural`` * log2(e)."""
    block, kh = tl.program_id(0), tl.program_id(1)
    _, start, tokens, begin = block_of(block, starts, R, PER, ROWS)
    rows = tokens * PER
    if begin >= rows:
        return
    valid, token, head = rows_from(begin, tokens, kh, PER, ROWS)
    d = tl.arange(0, D)
    at = (start + token).to(tl.int64) * (KH * PER) + head
    q_rows = tl.load(q + at[:, None] * D + d[None, :], mask=valid[:, None], other=0.0)
    g_rows = tl.load(grad + at[:, None] * D + d[None, :], mask=valid[:, None], other=0.0)
    row_at = (kh.to(tl.int64) * T + start) * PER + begin + tl.arange(0, ROWS)
    levels = tl.load(level + row_at, mask=valid, other=0.0)
    mean = tl.load(delta + row_at, mask=valid, other=0.0)
    acc = tl.zeros((ROWS, D), tl.float32)
    end = (tl.minimum(begin + ROWS, rows) - 1) // PER // KEYS + 1
    masked = tl.minimum((begin // PER + 1) // KEYS, end)  # in the blocks before, every row sees every key
    for kb in tl.range(0, masked, num_stages=STAGES):
        acc = dq_of(
            kb, k, v, q_rows, g_rows, levels, mean, acc, token, start, kh, rows, scale, KH, PER, D, KEYS, False, HARDWARE
        )
    for kb in tl.range(masked, end, num_stages=STAGES):
        acc = dq_of(
            kb, k, v, q_rows, g_rows, levels, mean, acc, token, start, kh, rows, scale, KH, PER, D, KEYS, True, HARDWARE
        )
    tl.store(dq + at[:, None] * D + d[None, :], narrowed(acc * natural, HARDWARE), mask=valid[:, None])


@triton.jit
def dkdv_of(  # type: ignore[no-untyped-def]
    rb, q, grad, level, delta, k_rows, v_rows, dk_acc, dv_acc, key, keys, start, kh, T, scale,
    KH: tl.constexpr, PER: tl.constexpr, D: tl.constexpr, WALKED: tl.constexpr, MASKED: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Add a block of rows. Without MASKED, every row of the block must exist and see every held key."""
    row, d = rb * WALKED + tl.arange(0, WALKED), tl.arange(0, D)
    valid = row < keys * PER if MASKED else tl.full((WALKED,), True, tl.int1)
    token = row // PER
    at = (start + token).to(tl.int64) * (KH * PER) + kh * PER + row % PER
    q_rows = tl.load(q + at[:, None] * D + d[None, :], mask=valid[:, None], other=0.0)
    g_rows = tl.load(grad + at[:, None] * D + d[None, :], mask=valid[:, None], other=0.0)
    row_at = (kh.to(tl.int64) * T + start) * PER + row
    levels = tl.load(level + row_at, mask=valid, other=0.0)
    mean = tl.load(delta + row_at, mask=valid, other=0.0)
    p = tl.exp2(tl.dot(k_rows, tl.trans(q_rows)) * scale - levels[None, :])
    if MASKED:
        p = tl.where((key[:, None] <= token[None, :]) & valid[None, :], p, 0.0)
    dv_acc += tl.dot(narrowed(p, HARDWARE), g_rows)
    ds = p * (tl.dot(v_rows, tl.trans(g_rows)) - mean[None, :])
    return dk_acc + tl.dot(narrowed(ds, HARDWARE), q_rows), dv_acc


@triton.jit(do_not_specialize=["R", "T"])  # one binary for every batch
def dkdv_kernel(  # type: ignore[no-untyped-def]
    q, k, v, grad, level, delta, dk, dv, starts, R, T, scale, natural,
    KH: tl.constexpr, PER: tl.constexpr, D: tl.constexpr, HELD: tl.constexpr, WALKED: tl.constexpr, STAGES: tl.constexpr,
    HARDWARE: tl.constexpr,
):  # fmt: skip
    """Hold keys and values, and loop over the rows of all query heads that share them."""
    block, kh = tl.program_id(0), tl.program_id(1)
    _, start, keys, begin = block_of(block, starts, R, 1, HELD)
    if begin >= keys:
        return
    key = begin + tl.arange(0, HELD)
    d = tl.arange(0, D)
    there = key < keys
    k_at = ((start + key).to(tl.int64) * KH + kh) * D
    k_rows = tl.load(k + k_at[:, None] + d[None, :], mask=there[:, None], other=0.0)
    v_rows = tl.load(v + k_at[:, None] + d[None, :], mask=there[:, None], other=0.0)
    dk_acc = tl.zeros((HELD, D), tl.float32)
    dv_acc = tl.zeros((HELD, D), tl.float32)
    first, end = begin * PER // WALKED, tl.cdiv(keys * PER, WALKED)
    whole = tl.minimum(tl.cdiv((begin + HELD - 1) * PER, WALKED), end)  # from this block on, every row sees all keys
    partial = tl.maximum(whole, keys * PER // WALKED)  # up to this block, every row is one of this sequence
    for rb in tl.range(whole, partial, num_stages=STAGES):
        dk_acc, dv_acc = dkdv_of(
            rb, q, grad, level, delta, k_rows, v_rows, dk_acc, dv_acc, key, keys, start, kh, T, scale, KH, PER, D, WALKED, False,
            HARDWARE,
        )  # fmt: skip
    for i in tl.range(first, end - (partial - whole), num_stages=STAGES):
        rb = i + tl.where(i < whole, 0, partial - whole)
        dk_acc, dv_acc = dkdv_of(
            rb, q, grad, level, delta, k_rows, v_rows, dk_acc, dv_acc, key, keys, start, kh, T, scale, KH, PER, D, WALKED, True,
            HARDWARE,
        )  # fmt: skip
    tl.store(dk + k_at[:, None] + d[None, :], narrowed(dk_acc * natural, HARDWARE), mask=there[:, None])
    tl.store(dv + k_at[:, None] + d[None, :], narrowed(dv_acc, HARDWARE), mask=there[:, None])


def attention_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad: Tensor, cu_seqlens: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return BF16 dQ [T, H, D], dK and dV [T, KH, D] from the forward's inputs and outputs; ``cu_seqlens`` is int32."""
    q, k, v, out, grad = (t.contiguous() for t in (q, k, v, out, grad))
    T, H, D = q.shape
    check_head_dim(D)
    check_device(q, k, v, out, lse, grad, cu_seqlens)
    kv_heads, sequences = k.shape[1], cu_seqlens.shape[0] - 1
    dq, dk, dv = (torch.empty_like(t) for t in (q, k, v))
    if T and sequences:
        hardware, heads = not triton.knobs.runtime.interpret, {"KH": kv_heads, "PER": H // kv_heads, "D": D}
        delta, level = (torch.empty(kv_heads, T * H // kv_heads, dtype=torch.float32, device=q.device) for _ in range(2))
        row_sums_kernel[(-(-T * H // SUMMED),)](
            grad, out, lse, delta, level, T, **heads, SUMMED=SUMMED, HARDWARE=hardware, num_warps=WARPS, **PINNED
        )
        numbers = (cu_seqlens, sequences, T, scale * LOG2E, scale)
        fixed = {**heads, "STAGES": STAGES, "num_stages": STAGES, "HARDWARE": hardware, **PINNED}
        held, walked, warps = DQ[D]
        dq_kernel[(row_blocks(T, H // kv_heads, sequences, held), kv_heads)](
            q, k, v, grad, level, delta, dq, *numbers, ROWS=held, KEYS=walked, num_warps=warps, **fixed
        )
        held, walked, warps = DKDV[D]
        dkdv_kernel[(row_blocks(T, 1, sequences, held), kv_heads)](
            q, k, v, grad, level, delta, dk, dv, *numbers, HELD=held, WALKED=walked, num_warps=warps, **fixed
        )
    return dq, dk, dv
