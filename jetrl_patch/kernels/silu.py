"""SiLU(gate) * up, fused with the quantization of the product, and its gradient. Raises what ``common.check_input`` raises."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl_patch.config.formats import ScaleFormat
from jetrl_patch.errors import explain
from jetrl_patch.kernels.common import (
    COMPILER,
    bf16_value,
    check_input,
    load_tile,
    new_rows,
    new_tokens,
    options,
    store_rows,
    store_tokens,
)
from jetrl_patch.kernels.formats import FP8, groups
from jetrl_patch.kernels.gemm_common import PINNED, check_device, converted, rounded
from jetrl_patch.kernels.quantize import BOTH_WARPS, FEW, FEW_ROWS, ROWS

# ---- SiLU * up and its quantization in one kernel, which writes the BF16 product only if requested
# The values are those of the FP64 formula in ``exact.elementwise``. SiLU is computed in FP32 with only fma, product, sum and IEEE
# division, in a fixed order. It rounds to the same BF16 value for each of the 65,536 gates: all exact values but two are at least
# 2^-26 away from a rounding boundary (a test checks all of them).

#: factor of the warps: without ``sched4reg``, 16 elements per thread would need more than 64 registers, so a thread gets 8
SPREAD = 1 if "sched4reg" in COMPILER else 2
#: rows and warps of a tile, for many and for few tokens
TILE, TILE_OF_FEW = (ROWS, 8 * SPREAD), (FEW_ROWS, SPREAD)


@triton.jit
def silu(g):  # type: ignore[no-untyped-def]
    """g / (1 + e^-g) to about 1 ulp, for FP32 g with BF16 values; e^-|g| = 2^n * p with n an integer and p near 1."""
    a = tl.minimum(tl.abs(g), 200.0)  # e^-200 is 0 in BF16
    n = tl.fma(-a, 1.4426950408889634, 12582912.0) - 12582912.0  # rounds to an integer
    r = tl.fma(n, -0.693359375, -a)  # ln 2 in two parts; the first product is exact
    r = tl.fma(n, 2.12194440e-4, r)
    p = tl.fma(r, 1.0 / 5040, 1.0 / 720)
    p = tl.fma(p, r, 1.0 / 120)
    p = tl.fma(p, r, 1.0 / 24)
    p = tl.fma(p, r, 1.0 / 6)
    p = tl.fma(p, r, 0.5)
    p = tl.fma(tl.fma(p, r, 1.0), r, 1.0)
    whole = n.to(tl.int32)
    first = tl.maximum(whole, -100)  # 2^n in two factors: only the second product can be subnormal and round
    second = tl.maximum(whole - first, -126)
    one = ((first + 127) << 23).to(tl.float32, bitcast=True)
    two = ((second + 127) << 23).to(tl.float32, bitcast=True)
    y = tl.math.div_rn(tl.where(g < 0, -a * p, g), 1.0 + p * one)
    y = tl.where(g < 0, y * one * two, y)
    return tl.where(g == g, tl.where(g == float("-inf"), float("nan"), y), g)


@triton.jit
def silu_mul_tile(gate, up, m, k, M, K, gate_m, up_m, HARDWARE: tl.constexpr):  # type: ignore[no-untyped-def]
    """bf16(bf16(silu(gate)) * up) for a tile, as FP32."""
    g = load_tile(gate, m, k, M, K, gate_m, HARDWARE)
    u = load_tile(up, m, k, M, K, up_m, HARDWARE)
    return bf16_value(bf16_value(silu(g), HARDWARE) * u, HARDWARE)


@triton.jit(do_not_specialize=["M", "s_g"])  # one binary for every batch
def silu_mul_rows_kernel(  # type: ignore[no-untyped-def]
    gate, up, q, s, y, M, K, gate_m, up_m, s_m, s_g,
    ROWS: tl.constexpr, KEEP: tl.constexpr, POW2: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """KEEP also stores the BF16 product."""
    G = tl.cdiv(K, 128)
    m = (tl.program_id(0) // G) * ROWS + tl.arange(0, ROWS)
    g = tl.program_id(0) % G
    k = g * 128 + tl.arange(0, 128)
    tile = silu_mul_tile(gate, up, m, k, M, K, gate_m, up_m, HARDWARE)
    store_rows(tile, q, s, m, g, M, K, s_m, s_g, POW2, HARDWARE)
    if KEEP:
        tl.store(y + m.to(tl.int64)[:, None] * K + k[None, :], rounded(tile), mask=(m < M)[:, None] & (k < K)[None, :])


class Multiplied(NamedTuple):
    """Output of SiLU * up: e4m3 [M, K], FP32 scales [M, G], and the BF16 result [M, K] if requested."""

    q_MK: Tensor
    s_MG: Tensor
    y_MK: Tensor | None


def silu_mul_quantize_rows(
    gate_MK: Tensor, up_MK: Tensor, scale_format: ScaleFormat, columns: bool = False, keep: bool = False
) -> Multiplied:
    """``quantize_rows(silu_mul(gate, up))``. Gate and up may be halves of one tensor.

    Args:
        columns: as for ``quantize_rows``.
        keep: also return the BF16 result.
    """
    check_input("gate", gate_MK)
    check_input("up", up_MK)
    if gate_MK.shape != up_MK.shape or gate_MK.device != up_MK.device:
        required = "gate and up with the same shape and device"
        found = f"{list(gate_MK.shape)} on {gate_MK.device} and {list(up_MK.shape)} on {up_MK.device}"
        raise ValueError(explain("SiLU * up", required=required, found=found, fix="pass both halves of one projection"))
    fixed, (M, K) = options(scale_format), gate_MK.shape
    q, s = new_rows(gate_MK, M, K, columns)
    y = torch.empty_like(gate_MK, memory_format=torch.contiguous_format) if keep else None
    if q.numel():
        rows, warps = TILE if M > FEW else TILE_OF_FEW
        silu_mul_rows_kernel[(-(-M // rows) * groups(K),)](
            gate_MK, up_MK, q, s, gate_MK if y is None else y, M, K, gate_MK.stride(0), up_MK.stride(0), *s.stride(),
            ROWS=rows, KEEP=keep, num_warps=warps, **fixed,
        )  # fmt: skip
    return Multiplied(q.view(FP8), s, y)


# ---- The gradients of SiLU(gate) * up in one kernel, which reads gate, up and dy and writes dgate and dup: 10 bytes per element
#     s = 1 / (1 + e^-gate)      dgate = dy * up * s * (1 + gate * (1 - s))      dup = dy * (gate * s)
#
# Computed in FP32, each rounded once. In torch's operations the same formula takes fourteen kernels and 126 bytes per element.
# The rollout has no gradients, so the exponential may be the hardware's.
#
# If the layers before it compute in FP8, the same pass also quantizes both gradients, each in the two layouts that DGrad and
# WGrad read. That writes 4 more bytes per element, but saves those layers a launch each and 4 bytes of reading the gradients
# again.

#: rows and warps of a tile with 128 columns
BACKWARD_ROWS, WARPS = 8, 4


@triton.jit
def sigmoids(g):  # type: ignore[no-untyped-def]
    """(s, 1 - s). e^-|g| cannot overflow, and 1 - s is not the difference of nearly equal numbers."""
    e = tl.exp(-tl.abs(g))
    near = 1.0 / (1.0 + e)  # sigmoid(|g|)
    far = e * near  # sigmoid(-|g|)
    return tl.where(g < 0, far, near), tl.where(g < 0, near, far)


@triton.jit
def silu_mul_gradients(g, u, dy):  # type: ignore[no-untyped-def]
    """(dgate, dup) in FP32."""
    s, rest = sigmoids(g)
    return dy * u * s * (1.0 + g * rest), dy * (g * s)


@triton.jit(do_not_specialize=["M"])  # one binary for every batch
def silu_mul_backward_kernel(  # type: ignore[no-untyped-def]
    gate, up, dy, dgate, dup, M, K, gate_m, up_m, dy_m, ROWS: tl.constexpr, HARDWARE: tl.constexpr
):
    """A tile [ROWS, 128]. The gradients are contiguous."""
    G = tl.cdiv(K, 128)
    m = (tl.program_id(0) // G) * ROWS + tl.arange(0, ROWS)
    k = (tl.program_id(0) % G) * 128 + tl.arange(0, 128)
    g, u = load_tile(gate, m, k, M, K, gate_m, HARDWARE), load_tile(up, m, k, M, K, up_m, HARDWARE)
    dg, du = silu_mul_gradients(g, u, load_tile(dy, m, k, M, K, dy_m, HARDWARE))
    at, inside = m.to(tl.int64)[:, None] * K + k[None, :], (m < M)[:, None] & (k < K)[None, :]
    tl.store(dgate + at, converted(dg, dgate), mask=inside)
    tl.store(dup + at, converted(du, dup), mask=inside)


@triton.jit
def _store_both(x, y, q, s, qt, st, gm, gk, M, K, s_m, s_g, pitch, POW2: tl.constexpr, HARDWARE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store a tile 128 x 128 of a gradient in BF16, and the BF16 value quantized in both layouts."""
    m, k = gm * 128 + tl.arange(0, 128), gk * 128 + tl.arange(0, 128)
    tl.store(y + m.to(tl.int64)[:, None] * K + k[None, :], rounded(x), mask=(m < M)[:, None] & (k < K)[None, :])
    tile = bf16_value(x, HARDWARE)
    store_rows(tile, q, s, m, gk, M, K, s_m, s_g, POW2, HARDWARE)
    store_tokens(tile, qt, st, gm, k, K, pitch, POW2, HARDWARE)


@triton.jit(do_not_specialize=["M", "s_g"])  # one binary for every batch
def silu_mul_backward_both_kernel(  # type: ignore[no-untyped-def]
    gate, up, dy, dgate, qg, sg, qgt, sgt, dup, qu, su, qut, sut, M, K, gate_m, up_m, dy_m, s_m, s_g, pitch,
    POW2: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """A tile 128 x 128 of one gradient, then of the other, with the operations of ``silu_mul_gradients`` in their order.

    gate and dy are loaded twice, the second time from the L1 cache: a thread has too few registers to hold them.
    """
    G = tl.cdiv(K, 128)
    gm, gk = tl.program_id(0) // G, tl.program_id(0) % G
    m, k = gm * 128 + tl.arange(0, 128), gk * 128 + tl.arange(0, 128)
    g = load_tile(gate, m, k, M, K, gate_m, HARDWARE)
    s, _ = sigmoids(g)
    du = load_tile(dy, m, k, M, K, dy_m, HARDWARE) * (g * s)
    _store_both(du, dup, qu, su, qut, sut, gm, gk, M, K, s_m, s_g, pitch, POW2, HARDWARE)
    dg = load_tile(dy, m, k, M, K, dy_m, HARDWARE) * load_tile(up, m, k, M, K, up_m, HARDWARE)
    g = load_tile(gate, m, k, M, K, gate_m, HARDWARE)
    s, rest = sigmoids(g)
    dg = dg * s * (1.0 + g * rest)
    _store_both(dg, dgate, qg, sg, qgt, sgt, gm, gk, M, K, s_m, s_g, pitch, POW2, HARDWARE)


def silu_mul_backward(
    gate_MK: Tensor, up_MK: Tensor, dy_MK: Tensor, dtypes: tuple[torch.dtype, torch.dtype]
) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up, [M, K], in ``dtypes`` (BF16 or FP32).

    Args:
        gate_MK, up_MK: BF16, as the forward pass read them. They may be strided halves of one tensor.
        dy_MK: the gradient of the product, BF16 or FP32.
    """
    gate_MK, up_MK, dy_MK = (t if t.stride(1) == 1 else t.contiguous() for t in (gate_MK, up_MK, dy_MK))
    check_device(gate_MK, up_MK, dy_MK)
    M, K = gate_MK.shape
    dgate, dup = (torch.empty(M, K, dtype=dtype, device=gate_MK.device) for dtype in dtypes)
    if dgate.numel():
        silu_mul_backward_kernel[(-(-M // BACKWARD_ROWS) * groups(K),)](
            gate_MK, up_MK, dy_MK, dgate, dup, M, K, gate_MK.stride(0), up_MK.stride(0), dy_MK.stride(0), ROWS=BACKWARD_ROWS,
            HARDWARE=not triton.knobs.runtime.interpret, num_warps=WARPS, **PINNED,
        )  # fmt: skip
    return dgate, dup


#: what ``quantize_both`` returns
Bytes = tuple[Tensor, Tensor, Tensor, Tensor]


def silu_mul_backward_both(
    gate_MK: Tensor, up_MK: Tensor, dy_MK: Tensor, scale_format: ScaleFormat, columns: bool = False
) -> tuple[tuple[Tensor, Bytes], tuple[Tensor, Bytes]]:
    """``silu_mul_backward`` in BF16, and ``quantize_both`` of each gradient, bit for bit, with their arguments."""
    gate_MK, up_MK, dy_MK = (t if t.stride(1) == 1 else t.contiguous() for t in (gate_MK, up_MK, dy_MK))
    check_device(gate_MK, up_MK, dy_MK)
    fixed, (M, K) = options(scale_format), gate_MK.shape
    made = [
        (torch.empty(M, K, dtype=torch.bfloat16, device=gate_MK.device), *new_rows(gate_MK, M, K, columns),
         *new_tokens(gate_MK, M, K))
        for _ in range(2)
    ]  # fmt: skip
    if gate_MK.numel():
        _, _, s, qt, _ = made[0]
        silu_mul_backward_both_kernel[(groups(M) * groups(K),)](
            gate_MK, up_MK, dy_MK, *made[0], *made[1], M, K, gate_MK.stride(0), up_MK.stride(0), dy_MK.stride(0), *s.stride(),
            qt.stride(0), num_warps=BOTH_WARPS, **fixed,
        )  # fmt: skip
    gate, up = ((dx, (q.view(FP8), s, qt.view(FP8), st)) for dx, q, s, qt, st in made)
    return gate, up
