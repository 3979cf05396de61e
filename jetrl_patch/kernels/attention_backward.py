"""Gradients of the packed causal attention of ``attention.py`` (FlashAttention-2, arXiv 2307.08691, algorithm 2).

    P = exp(scale Q K^T - lse);  dV = P^T dO;  dP = dO V^T;  dS = P (dP - delta);  dQ = scale dS K;  dK = scale dS^T Q

with delta = rowsum(dO * O). The products take BF16 operands (P and dS are rounded) and accumulate in FP32. The rollout has no
counterpart, so the gradients need only be correct. Without atomics, they are also deterministic.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl_patch.kernels.aot import Spec
from jetrl_patch.kernels.attention import LOG2E, check_head_dim
from jetrl_patch.kernels.attention_rows import HEAD_DIMS, block_of, narrowed, row_blocks, rows_from
from jetrl_patch.kernels.e4m3 import widened
from jetrl_patch.kernels.gemm_common import PINNED, check_device

#: for dQ, a tile of ROWS rows walks blocks of KEYS keys; for dK and dV, a tile of HELD keys walks blocks of WALKED rows
ROWS, KEYS, HELD, WALKED, WARPS, STAGES = 64, 32, 64, 32, 4, 2
#: rows of a program that sums them
SUMMED = 32


@triton.jit(do_not_specialize=["rows"])  # one binary for every batch
def row_sums_kernel(grad, out, delta, rows, D: tl.constexpr, SUMMED: tl.constexpr, HARDWARE: tl.constexpr):  # type: ignore[no-untyped-def]
    """delta = rowsum(dO * O) in FP32; a row is one head of one token, contiguous in all tensors."""
    row = tl.program_id(0) * SUMMED + tl.arange(0, SUMMED)
    at = row.to(tl.int64)[:, None] * D + tl.arange(0, D)[None, :]
    valid = row < rows
    g = widened(tl.load(grad + at, mask=valid[:, None], other=0.0), HARDWARE)
    o = widened(tl.load(out + at, mask=valid[:, None], other=0.0), HARDWARE)
    tl.store(delta + row, tl.sum(g * o, 1), mask=valid)


@triton.jit(do_not_specialize=["R"])  # one binary for every batch
def dq_kernel(  # type: ignore[no-untyped-def]
    q, k, v, grad, lse, delta, dq, starts, R, scale, natural,
    KH: tl.constexpr, PER: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
    HARDWARE: tl.constexpr,
):  # fmt: skip
    """All tensors are contiguous [T, heads, D], ``lse`` and ``delta`` [T, H]; ``scale`` is ``natural`` * log2(e)."""
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
    level = tl.load(lse + at, mask=valid, other=0.0) * 1.4426950408889634
    mean = tl.load(delta + at, mask=valid, other=0.0)
    acc = tl.zeros((ROWS, D), tl.float32)
    last = (tl.minimum(begin + ROWS, rows) - 1) // PER
    for kb in tl.range(0, last // KEYS + 1, num_stages=STAGES):
        key = kb * KEYS + tl.arange(0, KEYS)
        there = key * PER < rows
        k_at = ((start + key).to(tl.int64) * KH + kh) * D
        k_rows = tl.load(k + k_at[:, None] + d[None, :], mask=there[:, None], other=0.0)
        v_rows = tl.load(v + k_at[:, None] + d[None, :], mask=there[:, None], other=0.0)
        s = tl.dot(q_rows, tl.trans(k_rows)) * scale - level[:, None]
        p = tl.where(key[None, :] <= token[:, None], tl.exp2(s), 0.0)
        ds = p * (tl.dot(g_rows, tl.trans(v_rows)) - mean[:, None])
        acc += tl.dot(narrowed(ds, HARDWARE), k_rows)
    tl.store(dq + at[:, None] * D + d[None, :], narrowed(acc * natural, HARDWARE), mask=valid[:, None])


@triton.jit(do_not_specialize=["R"])  # one binary for every batch
def dkdv_kernel(  # type: ignore[no-untyped-def]
    q, k, v, grad, lse, delta, dk, dv, starts, R, scale, natural,
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
    for rb in tl.range(begin * PER // WALKED, tl.cdiv(keys * PER, WALKED), num_stages=STAGES):
        row = rb * WALKED + tl.arange(0, WALKED)
        valid = row < keys * PER
        token = row // PER
        at = (start + token).to(tl.int64) * (KH * PER) + kh * PER + row % PER
        q_rows = tl.load(q + at[:, None] * D + d[None, :], mask=valid[:, None], other=0.0)
        g_rows = tl.load(grad + at[:, None] * D + d[None, :], mask=valid[:, None], other=0.0)
        level = tl.load(lse + at, mask=valid, other=0.0) * 1.4426950408889634
        mean = tl.load(delta + at, mask=valid, other=0.0)
        s = tl.dot(k_rows, tl.trans(q_rows)) * scale - level[None, :]
        p = tl.where((key[:, None] <= token[None, :]) & valid[None, :], tl.exp2(s), 0.0)
        dv_acc += tl.dot(narrowed(p, HARDWARE), g_rows)
        ds = p * (tl.dot(v_rows, tl.trans(g_rows)) - mean[None, :])
        dk_acc += tl.dot(narrowed(ds, HARDWARE), q_rows)
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
        delta, hardware = torch.empty(T, H, dtype=torch.float32, device=q.device), not triton.knobs.runtime.interpret
        row_sums_kernel[(-(-T * H // SUMMED),)](
            grad, out, delta, T * H, D=D, SUMMED=SUMMED, HARDWARE=hardware, num_warps=WARPS, **PINNED
        )
        numbers = (cu_seqlens, sequences, scale * LOG2E, scale)
        fixed = {
            "KH": kv_heads,
            "PER": H // kv_heads,
            "D": D,
            "STAGES": STAGES,
            "num_stages": STAGES,
            "num_warps": WARPS,
        }
        fixed |= {"HARDWARE": hardware, **PINNED}
        dq_kernel[(row_blocks(T, H // kv_heads, sequences, ROWS), kv_heads)](
            q, k, v, grad, lse, delta, dq, *numbers, ROWS=ROWS, KEYS=KEYS, **fixed
        )
        dkdv_kernel[(row_blocks(T, 1, sequences, HELD), kv_heads)](
            q, k, v, grad, lse, delta, dk, dv, *numbers, HELD=HELD, WALKED=WALKED, **fixed
        )
    return dq, dk, dv


def _specs() -> tuple[Spec, ...]:
    inputs = dict.fromkeys(("q", "k", "v", "grad"), "*bf16") | dict.fromkeys(("lse", "delta"), "*fp32")
    numbers = {"starts": "*i32", "R": "i32", "scale": "fp32", "natural": "fp32"}
    options = {"num_warps": WARPS, "num_stages": STAGES, **PINNED}
    found = []
    for D in HEAD_DIMS:
        fixed = {"KH": 4, "PER": 7, "D": D, "STAGES": STAGES, "HARDWARE": True}
        found += [
            Spec(f"attention_dq_{D}", dq_kernel, inputs | {"dq": "*bf16"} | numbers,
                 {**fixed, "ROWS": ROWS, "KEYS": KEYS}, options),
            Spec(f"attention_dkdv_{D}", dkdv_kernel, inputs | {"dk": "*bf16", "dv": "*bf16"} | numbers,
                 {**fixed, "HELD": HELD, "WALKED": WALKED}, options),
            Spec(f"attention_row_sums_{D}", row_sums_kernel,
                 dict.fromkeys(("grad", "out"), "*bf16") | {"delta": "*fp32", "rows": "i32"},
                 {"D": D, "SUMMED": SUMMED, "HARDWARE": True}, {"num_warps": WARPS, **PINNED}),
        ]  # fmt: skip
    return tuple(found)


KERNELS = _specs()
