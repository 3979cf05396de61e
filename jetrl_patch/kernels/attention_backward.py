"""Gradients of the packed causal attention of ``attention.py`` (FlashAttention-2, arXiv 2307.08691, algorithm 2).

    P = exp(scale Q K^T - lse);  dV = P^T dO;  dP = dO V^T;  dS = P (dP - delta);  dQ = scale dS K;  dK = scale dS^T Q

with delta = rowsum(dO * O). The products take BF16 operands (P and dS are rounded) and accumulate in FP32. The rollout has no
counterpart, so the gradients need only be correct. Without atomics, they are also deterministic.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl_patch.kernels.aot import Spec
from jetrl_patch.kernels.attention import LOG2E, check_head_dim
from jetrl_patch.kernels.chunks import HEAD_DIMS, block_of, narrowed, row_blocks, rows_from
from jetrl_patch.kernels.common import widened
from jetrl_patch.kernels.gemm_common import PINNED, check_device


class Tile(NamedTuple):
    """What a program holds and what it walks, chosen by instructions a block and so that nothing spills in a loop."""

    held: int
    walked: int
    warps: int


#: head dimension -> rows that are held and keys that are walked for dQ
DQ = {64: Tile(64, 64, 4), 128: Tile(128, 64, 8)}
#: head dimension -> keys that are held and rows that are walked for dK and dV
DKDV = {64: Tile(64, 32, 4), 128: Tile(128, 32, 8)}
STAGES = 2
#: rows of a program that sums them, and its warps
SUMMED, WARPS = 32, 4


@triton.jit(do_not_specialize=["T"])  # one binary for every batch
def row_sums_kernel(  # type: ignore[no-untyped-def]
    grad, out, lse, delta, level, T,
    KH: tl.constexpr, PER: tl.constexpr, D: tl.constexpr, SUMMED: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Write delta and the log-sum-exp in base 2 (``level``), FP32 [KH, T * PER]: the order in which the other kernels walk rows.

    A row is one head of one token, contiguous in the tensors that are read.
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
    """Add a block of keys. Without MASKED every row sees every key of it."""
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
    """Tensors are contiguous [T, heads, D], but ``level`` and ``delta`` [KH, T * PER]; ``scale`` is ``natural`` * log2(e)."""
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
    masked = tl.minimum((begin // PER + 1) // KEYS, end)  # every row sees the keys of the blocks before
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
    """Add a block of rows. Without MASKED there is every row of it, and sees every key held."""
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
    """Hold keys and values, and walk the rows of all query heads that share them."""
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
    whole = tl.minimum(tl.cdiv((begin + HELD - 1) * PER, WALKED), end)  # from here on every row sees all keys,
    partial = tl.maximum(whole, keys * PER // WALKED)  # and up to here there are only rows of this sequence
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
        delta, level = torch.empty(2, kv_heads, T * H // kv_heads, dtype=torch.float32, device=q.device)
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


def _specs() -> tuple[Spec, ...]:
    inputs = dict.fromkeys(("q", "k", "v", "grad"), "*bf16") | dict.fromkeys(("level", "delta"), "*fp32")
    numbers = {"starts": "*i32", "R": "i32", "T": "i32", "scale": "fp32", "natural": "fp32"}
    found = []
    for D in HEAD_DIMS:
        heads = {"KH": 4, "PER": 7, "D": D, "HARDWARE": True}
        for name, kernel, tile, sizes, written in (
            ("dq", dq_kernel, DQ[D], ("ROWS", "KEYS"), ("dq",)),
            ("dkdv", dkdv_kernel, DKDV[D], ("HELD", "WALKED"), ("dk", "dv")),
        ):
            fixed = {**heads, "STAGES": STAGES, **dict(zip(sizes, tile, strict=False))}
            options = {"num_warps": tile.warps, "num_stages": STAGES, **PINNED}
            types = inputs | dict.fromkeys(written, "*bf16") | numbers
            found.append(Spec(f"attention_{name}_{D}", kernel, types, fixed, options))
        types = dict.fromkeys(("grad", "out"), "*bf16") | dict.fromkeys(("lse", "delta", "level"), "*fp32") | {"T": "i32"}
        options = {"num_warps": WARPS, **PINNED}
        found.append(Spec(f"attention_row_sums_{D}", row_sums_kernel, types, {**heads, "SUMMED": SUMMED}, options))
    return tuple(found)


KERNELS = _specs()
