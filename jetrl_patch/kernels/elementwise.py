"""Elementwise kernels of exact mode, the rotary embedding among them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl_patch.kernels.aot import Spec
from jetrl_patch.kernels.common import bf16_value, widened
from jetrl_patch.kernels.formats import BLOCK, groups
from jetrl_patch.kernels.gemm_common import PINNED, check_device, converted, rounded
from jetrl_patch.kernels.silu import silu_mul_tile

# ---- SiLU * up and rotary embedding with Hugging Face's rounding; each result depends on its own inputs only

#: rows and warps per tile
ROWS, WARPS = 8, 4
#: minimum of head dimension times heads in a rotary tile
SPAN = 1024


@triton.jit(do_not_specialize=["M"])  # one binary for every batch
def silu_mul_kernel(gate, up, y, M, K, gate_m, up_m, ROWS: tl.constexpr, HARDWARE: tl.constexpr):  # type: ignore[no-untyped-def]
    """A tile [ROWS, 128]; the values equal those of ``silu.py``, which quantizes them in the same kernel."""
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
    """HEADS heads of one token: bf16(bf16(x cos) + bf16(rotate_half(x) sin)); tables [P, D/2], y contiguous."""
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
    """Rotate BF16 [T, h, D], D a power of two, by the BF16 tables [P, D/2] at ``positions`` [T] int64. Returns a new tensor."""
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


ELEMENTWISE_KERNELS = (
    Spec(
        "silu_mul", silu_mul_kernel, dict.fromkeys(("gate", "up", "y"), "*bf16")
        | dict.fromkeys(("M", "K", "gate_m", "up_m"), "i32"),
        {"ROWS": ROWS, "HARDWARE": True}, {"num_warps": WARPS, **PINNED}, ("K", "gate_m", "up_m"),
    ),
    *(
        Spec(
            f"rotary_{D}", rotary_kernel, dict.fromkeys(("x", "y", "cos", "sin"), "*bf16")
            | {"positions": "*i64", "heads": "i32", "x_t": "i32", "x_h": "i32"},
            {"D": D, "HEADS": SPAN // D, "HARDWARE": True}, {"num_warps": WARPS, **PINNED}, ("x_t", "x_h"),
        )
        for D in (64, BLOCK)
    ),
)  # fmt: skip


# ---- The rotary embedding of queries and keys in one launch, and its gradient in another: 4 bytes an element each in BF16
#     forward      first = low cos - high sin      second = high cos + low sin      low, high: the halves of a head's rotated part
#     backward     dlow = dfirst cos + dsecond sin      dhigh = dsecond cos - dfirst sin
#
# Forward has Hugging Face's roundings: each product and the sum, in the dtype to which torch promotes a head and the tables. The
# gradient is the trainer's own: FP32, rounded once. In torch's operations both take 24 launches and 48 bytes an element together.

#: head dimension times heads in a tile, 8 or 16 elements a thread
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
    """Heads ``h`` of one token: the first R of D elements are rotated by rows of the tables, the others are copied."""
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
    """Queries and keys [B, T, heads, D], rotated, in ``dtypes`` and in memory of this order.

    Args:
        q_BThD, k_BTgD: BF16 or FP32; anything but the elements of a head may be strided.
        cos, sin: [B or 1, T, R], BF16 or FP32; the first R elements of a head are rotated.
        backward: the inputs are gradients of the results; ``dtypes`` those of what was rotated.
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
    """The first strides. That of a dimension of one element means nothing: 0 stands for all, or each would be compiled for."""
    return [step if n > 1 else 0 for n, step in zip(t.shape[:dims], t.stride())]


def _spec(D: int, R: int, backward: bool) -> Spec:
    return Spec(
        f"rotary_pair_{D}{f'_of_{R}' * (R < D)}{'_backward' * backward}", rotary_pair_kernel,
        dict.fromkeys(("q", "k", "cos", "sin", "q_out", "k_out"), "*bf16")
        | dict.fromkeys(("T", "q_heads", "k_heads", "q_b", "q_t", "q_h", "k_b", "k_t", "k_h", "c_b", "c_t"), "i32"),
        {
            "D": D, "R": R, "HALF": R // 2, "REST": D - R, "HEADS": ROTARY_SPAN // D, "BACKWARD": backward, "HARDWARE": True,
        },
        {"num_warps": ROTARY_WARPS, **PINNED}, ("q_b", "q_t", "q_h", "k_b", "k_t", "k_h", "c_b", "c_t"),
    )  # fmt: skip


ROTARY_KERNELS = tuple(_spec(D, R, backward) for D, R in ((64, 64), (BLOCK, BLOCK), (BLOCK, 64)) for backward in (False, True))

KERNELS: tuple[Spec, ...] = ELEMENTWISE_KERNELS + ROTARY_KERNELS
