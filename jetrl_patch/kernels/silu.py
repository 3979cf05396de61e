"""SiLU * up and its quantization in one kernel; the BF16 product reaches memory only if requested.

The values are those of ``exact.activation`` on a GPU (its FP64 formula). SiLU is computed in FP32 with only fma, product, sum
and IEEE division, in a fixed order, and rounds to the same BF16 for each of the 65,536 gates: all exact values but two are at
least 2^-26 away from a rounding boundary (a test checks all of them).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl_patch.errors import explain
from jetrl_patch.fp8.formats import ScaleFormat, groups
from jetrl_patch.kernels.aot import Spec
from jetrl_patch.kernels.e4m3 import bf16_value
from jetrl_patch.kernels.gemm_common import rounded
from jetrl_patch.kernels.outputs import COMPILER, as_fp8, check_input, new_rows, options
from jetrl_patch.kernels.quantize import FEW, FEW_ROWS, ROWS
from jetrl_patch.kernels.tiles import load_tile, store_rows

#: rows and warps of a tile, for many and for few tokens. A triton that cannot schedule for few registers needs more than 64 for
#: 16 elements a thread: there a thread gets 8
SPREAD = 1 if "sched4reg" in COMPILER else 2
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
    first = tl.maximum(whole, -100)  # 2^n in two factors: only the second product can be subnormal, so there is one rounding
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


def _gate_and_up(gate_MK: Tensor, up_MK: Tensor) -> None:
    check_input("gate", gate_MK)
    check_input("up", up_MK)
    if gate_MK.shape != up_MK.shape or gate_MK.device != up_MK.device:
        raise ValueError(
            explain(
                "SiLU * up",
                required="gate and up with the same shape and device",
                found=f"{list(gate_MK.shape)} on {gate_MK.device} and {list(up_MK.shape)} on {up_MK.device}",
                fix="pass both halves of one projection",
            )
        )


class Multiplied(NamedTuple):
    """Output of SiLU * up: e4m3 [M, K], FP32 scales [M, G], and the BF16 result [M, K] if requested."""

    q_MK: Tensor
    s_MG: Tensor
    y_MK: Tensor | None


def silu_mul_quantize_rows(
    gate_MK: Tensor, up_MK: Tensor, scale_format: ScaleFormat, columns: bool = False, keep: bool = False
) -> Multiplied:
    """``quantize_rows(silu_mul(gate, up))``; the two may be halves of one tensor.

    Args:
        columns: as for ``quantize_rows``.
        keep: also return the BF16 result.

    Raises:
        TypeError, ValueError, ConfigError: as ``outputs.check_input``.
    """
    _gate_and_up(gate_MK, up_MK)
    fixed, (M, K) = options(gate_MK, scale_format), gate_MK.shape
    q, s = new_rows(gate_MK, M, K, columns)
    y = torch.empty_like(gate_MK, memory_format=torch.contiguous_format) if keep else None
    if q.numel():
        rows, warps = TILE if M > FEW else TILE_OF_FEW
        silu_mul_rows_kernel[(-(-M // rows) * groups(K),)](
            gate_MK, up_MK, q, s, gate_MK if y is None else y, M, K, gate_MK.stride(0), up_MK.stride(0), *s.stride(),
            ROWS=rows, KEEP=keep, num_warps=warps, **fixed,
        )  # fmt: skip
    return Multiplied(as_fp8(q), s, y)


def _specs() -> tuple[Spec, ...]:
    found = []
    inputs = {"gate": "*bf16", "up": "*bf16", "q": "*u8", "s": "*fp32"}
    sizes = dict.fromkeys(("M", "K", "gate_m", "up_m", "s_m", "s_g"), "i32")
    aligned = ("K", "gate_m", "up_m")
    for scale in ("pow2", "fp32"):
        fixed = {"POW2": scale == "pow2", "HARDWARE": True}
        for rows, warps in (TILE, TILE_OF_FEW):
            for keep in (False, True):
                found.append(
                    Spec(
                        f"silu_mul_rows{rows}{'_kept' * keep}_{scale}", silu_mul_rows_kernel,
                        inputs | {"y": "*bf16"} | sizes, {"ROWS": rows, "KEEP": keep, **fixed},
                        {"num_warps": warps, **COMPILER}, aligned,
                    )
                )  # fmt: skip
    return tuple(found)


KERNELS = _specs()
