"""Gated delta nets of exact mode (``exact.delta_net``, with the formulas and a legend of the shapes) as Triton kernels.

One program owns some channels of the convolution, or some columns of a head's state, of one sequence, and walks its tokens in
order: in training, in a prefill, a chunk of one and a decoding step. Columns do not depend on one another, so programs exchange
nothing. The sums over K have the order of the compiled kernel. All of these uses run the same binary: ranks, batches, and whether
there is a pool of states, are arguments and not constants. A state passes through memory in FP32, which changes nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl_patch.kernels.common import widened
from jetrl_patch.kernels.gemm_common import PINNED, check_device, rounded

Sizes = tuple[int, int, int, int]
#: ``native.ops.DeltaInputs`` and ``Pool``
Inputs = tuple[Tensor, ...]
Pool = tuple[Tensor, Tensor, Tensor]

#: tokens and channels that a program of the convolution computes at a time, and its warps
ROWS, CHANNELS, CONV_WARPS = 32, 128, 4
#: heads for values whose gates a program computes
GATES = 32
#: columns of a state in a program, and its warps: one warp of 64 numbers a thread needs no barriers for its sums
COLUMNS, WARPS = 16, 1
#: the same in the gradient, whose sums over columns are stored for each program and added afterwards
BACK_COLUMNS, BACK_WARPS = 64, 4


# ---- The convolution, and the rule's inputs -------------------------------------------------------

@triton.jit(do_not_specialize=["stride", "held"], do_not_specialize_on_alignment=["state"])
def conv_kernel(  # type: ignore[no-untyped-def]
    x, w, y, starts, slots, fresh, state, C, x_t, stride, held,
    W: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """y = bf16(silu(sum over ascending taps)). With ``held``, a state is the last W - 1 inputs, and is replaced."""
    r = tl.program_id(0)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    begin = tl.load(starts + r)
    n = tl.load(starts + r + 1) - begin
    if n <= 0:
        return
    inside = c < C
    continues = tl.load(fresh + r, mask=held != 0, other=1) == 0
    old = state + tl.load(slots + r, mask=held != 0, other=0).to(tl.int64) * stride + c
    for first in range(0, n, ROWS):
        t = first + tl.arange(0, ROWS)
        total = tl.zeros((ROWS, CHANNELS), tl.float32)
        for j in tl.static_range(W):
            at = t - (W - 1) + j  # below 0: before this call
            there = (t < n)[:, None] & inside[None, :]
            here = x + (begin + at).to(tl.int64)[:, None] * x_t + c[None, :]
            value = widened(tl.load(here, mask=there & (at >= 0)[:, None], other=0.0), HARDWARE)
            earlier = tl.where(continues, at, 0)
            before = old[None, :] + (at + W - 1)[:, None] * C
            held_value = widened(tl.load(before, mask=there & (earlier < 0)[:, None], other=0.0), HARDWARE)
            tap = widened(tl.load(w + c * W + j, mask=inside, other=0.0), HARDWARE)
            value = tl.where((at >= 0)[:, None], value, held_value)
            total = tl.fma(tl.broadcast_to(tap[None, :], total.shape), value, total)
        out = tl.math.div_rn(total, 1.0 + tl.exp(-total))
        to = y + (begin + t).to(tl.int64)[:, None] * C + c[None, :]
        tl.store(to, rounded(out), mask=(t < n)[:, None] & inside[None, :])
    tl.debug_barrier()  # every thread has read the old state
    for j in tl.static_range(W - 1):
        at = n - (W - 1) + j
        value = tl.load(x + (begin + at).to(tl.int64) * x_t + c, mask=c < tl.where(at >= 0, C, 0), other=0.0)
        kept = tl.load(old + (at + W - 1) * C, mask=c < tl.where(continues & (at < 0), C, 0), other=0.0)
        tl.store(old + j * C, tl.where(at >= 0, value, kept), mask=c < tl.where(held != 0, C, 0))


@triton.jit(do_not_specialize=["a_t", "b_t", "KH", "H"], do_not_specialize_on_alignment=["a", "b"])
def inputs_kernel(  # type: ignore[no-untyped-def]
    y, a, b, A, bias, q, k, decay, beta, a_t, b_t, KH, H, scale,
    K: tl.constexpr, V: tl.constexpr, WIDTH: tl.constexpr, GATES: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """On axis 1: KH heads of queries, KH heads of keys, then blocks of gates, which are FP64 until the end."""
    t, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if part < 2 * KH:
        d = tl.arange(0, WIDTH)
        row = widened(tl.load(y + t * (2 * KH * K + H * V) + part * K + d, mask=d < K, other=0.0), HARDWARE)
        unit = row * tl.math.div_rn(1.0, tl.math.sqrt_rn(tl.sum(row * row, 0) + 1e-6))
        if part < KH:
            tl.store(q + (t * KH + part) * K + d, unit * scale, mask=d < K)
        else:
            tl.store(k + (t * KH + part - KH) * K + d, unit, mask=d < K)
    else:
        h = (part - 2 * KH) * GATES + tl.arange(0, GATES)
        z = widened(tl.load(a + t * a_t + h, mask=h < H, other=0.0), HARDWARE).to(tl.float64)
        z += widened(tl.load(bias + h, mask=h < H, other=0.0), HARDWARE).to(tl.float64)
        rate = tl.exp(widened(tl.load(A + h, mask=h < H, other=0.0), HARDWARE).to(tl.float64))
        softplus = tl.maximum(z, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(z)))
        tl.store(decay + t * H + h, tl.exp(-rate * softplus).to(tl.float32), mask=h < H)
        gate = widened(tl.load(b + t * b_t + h, mask=h < H, other=0.0), HARDWARE).to(tl.float64)
        tl.store(beta + t * H + h, (1.0 / (1.0 + tl.exp(-gate))).to(tl.float32), mask=h < H)


# ---- The delta rule --------------------------------------------------------------------------------

@triton.jit
def scaled_add(a, column, row):  # type: ignore[no-untyped-def]
    """a [K, columns] + column [K] * row [columns]."""
    return tl.fma(tl.broadcast_to(column[:, None], a.shape), tl.broadcast_to(row[None, :], a.shape), a)


@triton.jit(do_not_specialize=["stride", "held", "kept", "KH", "H"], do_not_specialize_on_alignment=["state"])
def rule_kernel(  # type: ignore[no-untyped-def]
    q, k, y, decay, beta, starts, slots, fresh, state, o, u, stride, held, kept, KH, H,
    K: tl.constexpr, V: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """S = decay S,  u = v - k^T S,  S += k (beta u),  o = bf16(q^T S). ``kept`` also stores u; ``held`` uses the states."""
    r, h = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(starts + r), tl.load(starts + r + 1)
    if begin >= end:
        return
    d, c = tl.arange(0, WIDTH), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    continues = tl.load(fresh + r, mask=held != 0, other=1) == 0
    slot = tl.load(slots + r, mask=held != 0, other=0).to(tl.int64)
    at = state + slot * stride + (h * K + d)[:, None] * V + c[None, :]
    S = tl.load(at, mask=(d < tl.where(continues, K, 0))[:, None] & (c < V)[None, :], other=0.0)
    for step in range(0, end - begin):
        t = begin.to(tl.int64) + step
        key_at = (t * KH + h // (H // KH)) * K + d
        q_row, k_row = tl.load(q + key_at, mask=d < K, other=0.0), tl.load(k + key_at, mask=d < K, other=0.0)
        v_row = tl.load(y + t * (2 * KH * K + H * V) + 2 * KH * K + h * V + c, mask=c < V, other=0.0)
        S = S * tl.load(decay + t * H + h)
        u_row = widened(v_row, HARDWARE) - tl.sum(S * k_row[:, None], 0)
        S = scaled_add(S, k_row, u_row * tl.load(beta + t * H + h))
        out_at = (t * H + h) * V + c
        tl.store(o + out_at, rounded(tl.sum(S * q_row[:, None], 0)), mask=c < V)
        tl.store(u + out_at, u_row, mask=c < tl.where(kept != 0, V, 0))
    tl.store(at, S, mask=(d < tl.where(held != 0, K, 0))[:, None] & (c < V)[None, :])


# ---- Its gradient, without stored states -----------------------------------------------------------
# From the gradient g of o, with dS that of the state, and u of the forward rule:
#
#     backwards:  dS += q g;   w = dS^T k;   dv = beta w;   dbeta = w . u;   dk = dS (beta u);   dS = decay (dS - k dv)
#     forwards:   S as above;  dq = S g;     dk -= (decay S before) dv
#
# No product of S and dS remains: the gradient of log(decay) is <decay S before, dS - k dv>. Scaling the state before a token by a
# factor scales what it adds to all later outputs, so with e = q . dq - v . dv that gradient is the sum of e from the token on. A
# sequence begins with an empty state, so all e add up to 0, and it is minus the sum of e before the token. The sum is FP64.

@triton.jit(do_not_specialize=["T", "KH", "H"])
def backwards_kernel(  # type: ignore[no-untyped-def]
    q, k, decay, beta, u, grad, starts, dk, dv, dbeta, T, KH, H,
    K: tl.constexpr, V: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """``dk`` [programs of a head, T, H, K] and ``dbeta`` [programs of a head, T, H] get the sums over the columns here."""
    r, h, part = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    begin, end = tl.load(starts + r), tl.load(starts + r + 1)
    d, c = tl.arange(0, WIDTH), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    dS = tl.zeros((WIDTH, COLUMNS), tl.float32)
    for back in range(0, end - begin):
        t = end.to(tl.int64) - 1 - back
        key_at, own = (t * KH + h // (H // KH)) * K + d, t * H + h
        q_row, k_row = tl.load(q + key_at, mask=d < K, other=0.0), tl.load(k + key_at, mask=d < K, other=0.0)
        b, u_row = tl.load(beta + own), tl.load(u + own * V + c, mask=c < V, other=0.0)
        dS = scaled_add(dS, q_row, tl.load(grad + own * V + c, mask=c < V, other=0.0))
        w = tl.sum(dS * k_row[:, None], 0)
        tl.store(dv + own * V + c, w * b, mask=c < V)
        tl.store(dbeta + part * T * H + own, tl.sum(w * u_row, 0))
        tl.store(dk + (part * T * H + own) * K + d, tl.sum(dS * (u_row * b)[None, :], 1), mask=d < K)
        dS = scaled_add(dS, k_row, -(w * b)) * tl.load(decay + own)


@triton.jit(do_not_specialize=["T", "KH", "H"])
def forwards_kernel(  # type: ignore[no-untyped-def]
    q, k, y, decay, beta, u, grad, starts, dq, dk, dv, dlog, T, KH, H,
    K: tl.constexpr, V: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """As ``backwards_kernel``, which has computed ``dv``: writes ``dq`` and ``dlog`` (of log(decay)), completes ``dk``."""
    r, h, part = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    begin, end = tl.load(starts + r), tl.load(starts + r + 1)
    d, c = tl.arange(0, WIDTH), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    S, before = tl.zeros((WIDTH, COLUMNS), tl.float32), tl.full([], 0.0, tl.float64)
    for step in range(0, end - begin):
        t = begin.to(tl.int64) + step
        key_at, own = (t * KH + h // (H // KH)) * K + d, t * H + h
        q_row, k_row = tl.load(q + key_at, mask=d < K, other=0.0), tl.load(k + key_at, mask=d < K, other=0.0)
        v_row = tl.load(y + t * (2 * KH * K + H * V) + 2 * KH * K + h * V + c, mask=c < V, other=0.0)
        u_row = tl.load(u + own * V + c, mask=c < V, other=0.0)
        dv_row = tl.load(dv + own * V + c, mask=c < V, other=0.0)
        S = S * tl.load(decay + own)
        to = (part * T * H + own) * K + d
        tl.store(dk + to, tl.load(dk + to, mask=d < K, other=0.0) - tl.sum(S * dv_row[None, :], 1), mask=d < K)
        S = scaled_add(S, k_row, u_row * tl.load(beta + own))
        dq_row = tl.sum(S * tl.load(grad + own * V + c, mask=c < V, other=0.0)[None, :], 1)
        tl.store(dq + to, dq_row, mask=d < K)
        tl.store(dlog + part * T * H + own, -before.to(tl.float32))
        before += (tl.sum(q_row * dq_row, 0) - tl.sum(widened(v_row, HARDWARE) * dv_row, 0)).to(tl.float64)


# ---- The host side, as in ``native.ops`` -----------------------------------------------------------

def _held(pool: Pool | None, dtype: torch.dtype, size: int, like: Tensor) -> tuple[tuple[Tensor, ...], int, int]:
    """Slots, fresh and states with the types that the kernels are compiled for, the distance of two states, and 1 if held."""
    if pool is None:
        kinds = (torch.int32, torch.uint8, dtype)
        return tuple(torch.empty(1, dtype=kind, device=like.device) for kind in kinds), 0, 0
    states, slots, fresh = pool
    if states.dtype != dtype or not states[0].is_contiguous() or states[0].numel() != size:
        found = f"{states.dtype} {list(states.shape)} with strides {states.stride()}"
        raise ValueError(f"states: expected contiguous states of {size} numbers in {dtype}, found {found}")
    return (slots.to(torch.int32).contiguous(), fresh.contiguous().view(torch.uint8), states), states.stride(0), 1


def conv(x_TC: Tensor, w_CW: Tensor, starts: Tensor, pool: Pool | None = None) -> Tensor:
    """As ``native.ops.conv``."""
    x_TC = x_TC if x_TC.stride(1) == 1 else x_TC.contiguous()
    (T, C), W, R = x_TC.shape, w_CW.shape[1], starts.numel() - 1
    held, stride, used = _held(pool, torch.bfloat16, (W - 1) * C, x_TC)
    check_device(x_TC, w_CW, starts, *held)
    y = torch.empty(T, C, dtype=torch.bfloat16, device=x_TC.device)
    if T and R:
        conv_kernel[(R, -(-C // CHANNELS))](
            x_TC, w_CW.contiguous(), y, starts.contiguous(), *held, C, x_TC.stride(0), stride, used, W=W, ROWS=ROWS,
            CHANNELS=CHANNELS, HARDWARE=not triton.knobs.runtime.interpret, num_warps=CONV_WARPS, **PINNED,
        )  # fmt: skip
    return y


def delta_inputs(y_TC: Tensor, a_TH: Tensor, b_TH: Tensor, A_log: Tensor, dt_bias: Tensor, sizes: Sizes) -> Inputs:
    """As ``native.ops.delta_inputs``."""
    (KH, H, K, V), T = sizes, y_TC.shape[0]
    a_TH, b_TH = (t if t.stride(1) == 1 else t.contiguous() for t in (a_TH, b_TH))
    check_device(y_TC, a_TH, b_TH, A_log, dt_bias)
    shapes = ((KH, K), (KH, K), (H,), (H,))
    found = tuple(torch.empty(T, *shape, dtype=torch.float32, device=y_TC.device) for shape in shapes)
    if T:
        inputs_kernel[(T, 2 * KH + -(-H // GATES))](
            y_TC, a_TH, b_TH, A_log.contiguous(), dt_bias.contiguous(), *found, a_TH.stride(0), b_TH.stride(0), KH, H, K**-0.5,
            K=K, V=V, WIDTH=triton.next_power_of_2(K), GATES=GATES, HARDWARE=not triton.knobs.runtime.interpret, num_warps=1,
            **PINNED,
        )  # fmt: skip
    return found


def delta_rule(inputs: Inputs, y_TC: Tensor, starts: Tensor, sizes: Sizes, pool: Pool | None = None) -> Tensor:
    """As ``native.ops.delta_rule``."""
    return _rule(inputs, y_TC, starts, sizes, pool)[0]


def _rule(
    inputs: Inputs, y_TC: Tensor, starts: Tensor, sizes: Sizes, pool: Pool | None, keep: bool = False
) -> tuple[Tensor, Tensor]:
    """The result BF16 [T, H, V], and with ``keep`` u, FP32 of the same shape."""
    (KH, H, K, V), T, R = sizes, y_TC.shape[0], starts.numel() - 1
    held, stride, used = _held(pool, torch.float32, H * K * V, y_TC)
    check_device(y_TC, starts, *inputs, *held)
    out = torch.empty(T, H, V, dtype=torch.bfloat16, device=y_TC.device)
    u = torch.empty((T, H, V) if keep else 1, dtype=torch.float32, device=y_TC.device)
    q, k, decay, beta = inputs
    if T and R:
        rule_kernel[(R, H, -(-V // COLUMNS))](
            q, k, y_TC, decay, beta, starts.contiguous(), *held, out, u, stride, used, int(keep), KH, H, K=K, V=V,
            WIDTH=triton.next_power_of_2(K), COLUMNS=COLUMNS, HARDWARE=not triton.knobs.runtime.interpret, num_warps=WARPS,
            **PINNED,
        )  # fmt: skip
    return out, u


def delta_gradients(
    inputs: Inputs, y_TC: Tensor, starts: Tensor, sizes: Sizes, grad_THV: Tensor
) -> tuple[Inputs, Tensor]:
    """As ``native.ops.delta_gradients``."""
    (KH, H, K, V), T, R = sizes, y_TC.shape[0], starts.numel() - 1
    grad_THV, starts = grad_THV.float().contiguous(), starts.contiguous()
    _, u = _rule(inputs, y_TC, starts, sizes, None, keep=True)
    parts = -(-V // BACK_COLUMNS)

    def new(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.float32, device=y_TC.device)

    dq, dk, dv, dlog, dbeta = new(parts, T, H, K), new(parts, T, H, K), new(T, H, V), new(parts, T, H), new(parts, T, H)
    q, k, decay, beta = inputs
    if T and R:
        grid, options = (R, H, parts), {"num_warps": BACK_WARPS, **PINNED}
        fixed = {"K": K, "V": V, "WIDTH": triton.next_power_of_2(K), "COLUMNS": BACK_COLUMNS, **options}
        backwards_kernel[grid](q, k, decay, beta, u, grad_THV, starts, dk, dv, dbeta, T, KH, H, **fixed)
        forwards_kernel[grid](
            q, k, y_TC, decay, beta, u, grad_THV, starts, dq, dk, dv, dlog, T, KH, H,
            HARDWARE=not triton.knobs.runtime.interpret, **fixed,
        )  # fmt: skip
    dq, dk = (t.unflatten(2, (KH, H // KH)).sum((0, 3)) for t in (dq, dk))  # the heads that share a key head
    return (dq, dk, dlog.sum(0), dbeta.sum(0)), dv
