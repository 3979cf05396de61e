"""Elementwise kernels: SiLU * up and the rotary embedding of exact mode, and the merged weight of LoRA."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl_patch.kernels.common import bf16_value, load_tile, widened
from jetrl_patch.kernels.formats import groups
from jetrl_patch.kernels.gemm_common import PINNED, check_device, converted, rounded
from jetrl_patch.kernels.silu import silu_mul_tile

# ---- SiLU * up and the rotary embedding with Hugging Face's rounding. Each result depends only on its own inputs

#: rows and warps per tile
ROWS, WARPS = 8, 4
#: head dimension times heads in a rotary tile
SPAN = 1024


@triton.jit(do_not_specialize=["M"])  # one binary for every batch
def silu_mul_kernel(gate, up, y, M, K, gate_m, up_m, ROWS: tl.constexpr, HARDWARE: tl.constexpr):  # type: ignore[no-untyped-def]
    """A tile [ROWS, 128]. ``silu.silu_mul_rows_kernel`` also quantizes the same values."""
    G = tl.cdiv(K, 128)
    m = (tl.program_id(0) // G) * ROWS + tl.arange(0, ROWS)
    k = (tl.program_id(0) % G) * 128 + tl.arange(0, 128)
    tile = silu_mul_tile(gate, up, m, k, M, K, gate_m, up_m, HARDWARE)
    tl.store(y + m.to(tl.int64)[:, None] * K + k[None, :], rounded(tile), mask=(m < M)[:, None] & (k < K)[None, :])


def silu_mul(gate_MK: Tensor, up_MK: Tensor) -> Tensor:
    """bf16(bf16(silu(gate)) * up), [M, K]. Inputs are BF16; their rows may be strided halves of one tensor."""
    gate_MK, up_MK = (t if t.stride(1) == 1 else t.contiguous() for t in (gate_MK, up_MK))
    check_device(gate_MK, up_MK)
    M, K = gate_MK.shape
    y = torch.empty(M, K, dtype=torch.bfloat16, device=gate_MK.device)
    if y.numel():
        silu_mul_kernel[(-(-M // ROWS) * groups(K),)](
            gate_MK, up_MK, y, M, K, gate_MK.stride(0), up_MK.stride(0), ROWS=ROWS,
            HARDWARE=not triton.knobs.runtime.interpret, num_warps=WARPS, **PINNED,
        )  # fmt: skip
    return y


@triton.jit
def rotary_kernel(  # type: ignore[no-untyped-def]
    x, y, cos, sin, positions, heads, x_t, x_h, D: tl.constexpr, HEADS: tl.constexpr, HARDWARE: tl.constexpr
):
    """HEADS heads of one token: bf16(bf16(x cos) + bf16(rotate_half(x) sin)). The tables are [P, D/2], y is contiguous."""
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, D // 2)
    position = tl.load(positions + t)
    c = widened(tl.load(cos + position * (D // 2) + d), HARDWARE)[None, :]
    s = widened(tl.load(sin + position * (D // 2) + d), HARDWARE)[None, :]
    there = (h < heads)[:, None]
    at = x + t * x_t + h[:, None] * x_h + d[None, :]
    low = widened(tl.load(at, mask=there, other=0.0), HARDWARE)
    high = widened(tl.load(at + D // 2, mask=there, other=0.0), HARDWARE)
    to = y + (t * heads + h[:, None]) * D + d[None, :]
    first = bf16_value(low * c, HARDWARE) - bf16_value(high * s, HARDWARE)
    second = bf16_value(high * c, HARDWARE) + bf16_value(low * s, HARDWARE)
    tl.store(to, rounded(first), mask=there)
    tl.store(to + D // 2, rounded(second), mask=there)


def rotary(x_ThD: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> Tensor:
    """Rotate BF16 [T, h, D] by the BF16 tables [P, D/2] at ``positions`` [T]. D is a power of two. Returns a new tensor."""
    T, heads, D = x_ThD.shape
    if D & (D - 1) or D < 2:
        raise ValueError(f"rotary embedding: expected a power of two as head dimension, found {D}")
    x_ThD = x_ThD if x_ThD.stride(2) == 1 else x_ThD.contiguous()
    positions = positions.to(torch.int64).contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    check_device(x_ThD, cos, sin, positions)
    y = torch.empty(T, heads, D, dtype=torch.bfloat16, device=x_ThD.device)
    if y.numel():
        together = min(max(SPAN // D, 1), triton.next_power_of_2(heads))
        rotary_kernel[(T, -(-heads // together))](
            x_ThD, y, cos, sin, positions, heads, x_ThD.stride(0), x_ThD.stride(1), D=D, HEADS=together,
            HARDWARE=not triton.knobs.runtime.interpret, num_warps=WARPS, **PINNED,
        )  # fmt: skip
    return y


# ---- The rotary embedding of queries and keys in one launch, and its gradient in another: 4 bytes per element each in BF16
#     forward      first = low cos - high sin      second = high cos + low sin      low, high: the halves of a head's rotated part
#     backward     dlow = dfirst cos + dsecond sin      dhigh = dsecond cos - dfirst sin
#
# The forward pass rounds as Hugging Face does: each product, then the sum, in the dtype to which torch promotes the head and the
# tables. The rollout has no gradient, so that is FP32, rounded once. torch's operations take 24 launches and 48 bytes per element
# for both together.

#: head dimension times heads in a tile: 8 or 16 elements per thread
ROTARY_SPAN = 2048
ROTARY_WARPS = 4


@triton.jit
def _product(a, b, like, HARDWARE: tl.constexpr):  # type: ignore[no-untyped-def]
    """a * b, rounded to the dtype of the pointer ``like``, as FP32."""
    if like.dtype.element_ty == tl.bfloat16:
        return bf16_value(a * b, HARDWARE)
    else:
        return a * b


@triton.jit
def _rotate(  # type: ignore[no-untyped-def]
    x, y, cos, sin, h, heads, x_h, y_h,
    D: tl.constexpr, R: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, BACKWARD: tl.constexpr,
    HARDWARE: tl.constexpr,
):  # fmt: skip
    """Heads ``h`` of one token: the first R of D elements are rotated by a row of the tables, the others are copied."""
    d = tl.arange(0, HALF)
    there = (h < heads)[:, None] & (d < R // 2)[None, :]
    c, s = cos + d, sin + d
    c_low = widened(tl.load(c, mask=d < R // 2, other=0.0), HARDWARE)[None, :]
    c_high = widened(tl.load(c + R // 2, mask=d < R // 2, other=0.0), HARDWARE)[None, :]
    s_low = widened(tl.load(s, mask=d < R // 2, other=0.0), HARDWARE)[None, :]
    s_high = widened(tl.load(s + R // 2, mask=d < R // 2, other=0.0), HARDWARE)[None, :]
    at, to = x + h[:, None] * x_h + d[None, :], y + h[:, None] * y_h + d[None, :]
    low = widened(tl.load(at, mask=there, other=0.0), HARDWARE)
    high = widened(tl.load(at + R // 2, mask=there, other=0.0), HARDWARE)
    if BACKWARD:
        first, second = tl.fma(high, s_high, low * c_low), tl.fma(-low, s_low, high * c_high)
    else:
        first = _product(low, c_low, y, HARDWARE) - _product(high, s_low, y, HARDWARE)
        second = _product(high, c_high, y, HARDWARE) + _product(low, s_high, y, HARDWARE)
    tl.store(to, converted(first, y), mask=there)
    tl.store(to + R // 2, converted(second, y), mask=there)
    if REST:
        e = R + tl.arange(0, REST)
        inside = (h < heads)[:, None] & (e < D)[None, :]
        kept = widened(tl.load(x + h[:, None] * x_h + e[None, :], mask=inside, other=0.0), HARDWARE)
        tl.store(y + h[:, None] * y_h + e[None, :], converted(kept, y), mask=inside)


@triton.jit(do_not_specialize=["T"])  # one binary for every batch
def rotary_pair_kernel(  # type: ignore[no-untyped-def]
    q, k, cos, sin, q_out, k_out, T, q_heads, k_heads, q_b, q_t, q_h, k_b, k_t, k_h, c_b, c_t,
    D: tl.constexpr, R: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, HEADS: tl.constexpr, BACKWARD: tl.constexpr,
    HARDWARE: tl.constexpr,
):  # fmt: skip
    """HEADS query or key heads of one token. The results are contiguous [B, T, heads, D]."""
    token = tl.program_id(0)
    b, t = (token // T).to(tl.int64), (token % T).to(tl.int64)
    row = token.to(tl.int64)
    c, s = cos + b * c_b + t * c_t, sin + b * c_b + t * c_t
    groups = tl.cdiv(q_heads, HEADS)
    group = tl.program_id(1)
    if group < groups:
        h = group * HEADS + tl.arange(0, HEADS)
        x, y = q + b * q_b + t * q_t, q_out + row * q_heads * D
        _rotate(x, y, c, s, h, q_heads, q_h, D, D, R, HALF, REST, BACKWARD, HARDWARE)
    else:
        h = (group - groups) * HEADS + tl.arange(0, HEADS)
        x, y = k + b * k_b + t * k_t, k_out + row * k_heads * D
        _rotate(x, y, c, s, h, k_heads, k_h, D, D, R, HALF, REST, BACKWARD, HARDWARE)


def rotary_pair(
    q_BThD: Tensor, k_BTgD: Tensor, cos: Tensor, sin: Tensor, dtypes: tuple[torch.dtype, torch.dtype], backward: bool = False
) -> tuple[Tensor, Tensor]:
    """Queries and keys [B, T, heads, D], rotated, in ``dtypes`` and contiguous.

    Args:
        q_BThD, k_BTgD: BF16 or FP32. The elements of a head are contiguous, other strides are free.
        cos, sin: [B or 1, T, R], BF16 or FP32. The first R elements of a head are rotated.
        backward: the inputs are the gradients of the results, and ``dtypes`` are those of the queries and keys.
    """
    q, k = (t if t.stride(3) == 1 else t.contiguous() for t in (q_BThD, k_BTgD))
    if cos.stride() != sin.stride() or cos.stride(2) != 1:
        cos, sin = cos.contiguous(), sin.contiguous()
    check_device(q, k, cos, sin)
    (B, T, heads, D), others, R = q.shape, k.shape[2], cos.shape[2]
    outs = [torch.empty(t.shape, dtype=dtype, device=q.device) for t, dtype in zip((q, k), dtypes)]
    if q.numel():
        together = min(max(ROTARY_SPAN // triton.next_power_of_2(D), 1), triton.next_power_of_2(max(heads, others)))
        rotary_pair_kernel[(B * T, -(-heads // together) + -(-others // together))](
            q, k, cos, sin, *outs, T, heads, others, *_steps(q, 3), *_steps(k, 3), *_steps(cos, 2),
            D=D, R=R, HALF=triton.next_power_of_2(R // 2), REST=triton.next_power_of_2(D - R) if D > R else 0,
            HEADS=together, BACKWARD=backward, HARDWARE=not triton.knobs.runtime.interpret, num_warps=ROTARY_WARPS, **PINNED,
        )  # fmt: skip
    return outs[0], outs[1]


def _steps(t: Tensor, dims: int) -> list[int]:
    """The first strides, with 0 for a dimension of size 1. Any value is right there, but Triton would compile for each."""
    return [step if n > 1 else 0 for n, step in zip(t.shape[:dims], t.stride())]


# ---- The merged weight of ``fp8.lora``, W' = bf16(W + scaling * Σ_j B_j A_j), in one pass over W -
# Each element is summed by itself in the order of j, so the tiling affects no bit. Products of BF16 values are exact in FP32, so
# an fma rounds once, as the formula does. The last product and sum must round separately, so fusion is off.

#: rows of a tile of 128 columns, and its warps
MERGE_ROWS, MERGE_WARPS = 32, 4


@triton.jit
def merge_kernel(w, a, b, y, N, K, R, scaling, ROWS: tl.constexpr, HARDWARE: tl.constexpr):  # type: ignore[no-untyped-def]
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
    merge_kernel[(-(-N // MERGE_ROWS) * groups(K),)](
        w, a, b, y, N, K, a.shape[0], scaling,
        ROWS=MERGE_ROWS, HARDWARE=not triton.knobs.runtime.interpret, num_warps=MERGE_WARPS, **PINNED,
    )  # fmt: skip
    return y
