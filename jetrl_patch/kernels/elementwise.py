"""SiLU * up and rotary embedding with Hugging Face's rounding; each result depends on its own inputs only."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl_patch.fp8.formats import BLOCK, groups
from jetrl_patch.kernels.aot import Spec
from jetrl_patch.kernels.e4m3 import bf16_value, widened
from jetrl_patch.kernels.gemm_common import PINNED, check_device, rounded
from jetrl_patch.kernels.silu import silu_mul_tile

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


KERNELS = (
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
