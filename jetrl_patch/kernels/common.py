"""Shared by the quantizing kernels: e4m3 arithmetic, tiles, and on the host the input checks and output tensors."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.backends.nvidia.compiler import CUDAOptions

from jetrl_patch.config.formats import FORMATS, ScaleFormat
from jetrl_patch.errors import explain
from jetrl_patch.kernels.formats import BLOCK, groups
from jetrl_patch.kernels.gemm_common import PINNED, check_device

# ---- Scales, e4m3fn bytes and BF16 rounding on the device, bit-equal to ``backends.quantize`` ---------
# The casts of Triton's interpreter are wrong, so everything uses bit operations or correctly rounded arithmetic, with the same
# result there and on a GPU. ``HARDWARE`` selects the GPU's conversions instead (``cvt.rn.satfinite.e4m3x2.f32``,
# ``cvt.rn.bf16x2.f32``). Both turn every NaN into the byte 0x7f.

# the bits of 1e-10, the amax floor, and of infinity
_FLOOR = tl.constexpr(0x2EDBE6FF)
_INF = tl.constexpr(0x7F800000)


@triton.jit
def magnitude(x):  # type: ignore[no-untyped-def]
    """The bits of |x| for FP32 x, which order as the values do. NaN is above everything, so a maximum keeps it."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_of(amax_bits, POW2: tl.constexpr):  # type: ignore[no-untyped-def]
    """``backends.quantize.scale_from_amax`` of the ``magnitude`` of an amax, with IEEE division, not ``div.full``.

    A power of two needs no division: 448 is 1.75 * 2^8, so the exponent drops by 8, or by 7 if the mantissa is above 1.75.
    (A quotient just above 1 does not round down to 1, because one more mantissa bit is worth 2^-23 / 1.75: more than half a bit
    of the quotient.)
    """
    bits = tl.where(amax_bits < _FLOOR, _FLOOR, amax_bits)
    if POW2:
        up = ((bits + 0x1FFFFF) & _INF) - (8 << 23)
        return tl.where(bits < _INF, up, bits).to(tl.float32, bitcast=True)
    else:
        return tl.math.div_rn(bits.to(tl.float32, bitcast=True), 448.0)


@triton.jit
def divided(x, scale, POW2: tl.constexpr):  # type: ignore[no-untyped-def]
    """x / scale, correctly rounded. ``scale`` has one value per group and is broadcast against x.

    A power of two between 2^-42 (from the floor) and 2^120 has an exact, normal reciprocal: the negated exponent.
    Products that become subnormal are far below the smallest e4m3 value.
    """
    if POW2:
        bits = scale.to(tl.int32, bitcast=True)
        special = tl.where(bits == _INF, 0, bits)  # 1 / Inf is 0, and NaN is NaN
        return x * tl.where(bits < _INF, 0x7F000000 - bits, special).to(tl.float32, bitcast=True)
    else:
        return tl.math.div_rn(x, scale)


@triton.jit
def widened(x, HARDWARE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Convert BF16 (or FP32) to FP32, exactly. Uses bits, because the interpreter is wrong for subnormals."""
    if HARDWARE or x.dtype == tl.float32:
        return x.to(tl.float32)
    else:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def bf16_value(x, HARDWARE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Round FP32 to the nearest BF16 value, ties to even, and keep it as FP32. A NaN stays a NaN."""
    if HARDWARE:
        return x.to(tl.bfloat16).to(tl.float32)
    else:
        bits = x.to(tl.uint32, bitcast=True)
        nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)
        return tl.where(x == x, nearest, x)


@triton.jit
def encode(y, HARDWARE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Convert FP32 to the nearest e4m3fn byte (uint8), ties to even, saturating at ±448."""
    if HARDWARE:
        return y.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = y.to(tl.int32, bitcast=True)
        a = bits & 0x7FFFFFFF
        normal = (a + 0x7FFFF + ((a >> 20) & 1) - 0x3C000000) >> 20  # mantissa 23 -> 3 bits, exponent bias 127 -> 7
        # adding 2^14 rounds to steps of 2^-9, the spacing of the subnormals
        tiny = (a.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        code = tl.where(a < 0x3C800000, tiny, normal)  # 2^-6
        code = tl.where(a >= 0x43E00000, 0x7E, code)  # 448
        code = code | ((bits >> 24) & 0x80)
        return tl.where(a > _INF, 0x7F, code).to(tl.uint8)


@triton.jit
def decode(q, HARDWARE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Convert an e4m3fn byte (uint8) to FP32, exactly."""
    if HARDWARE:
        return q.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        wide = q.to(tl.int32)
        a = wide & 0x7F
        normal = ((a << 20) + 0x3C000000).to(tl.float32, bitcast=True)
        value = tl.where(a < 8, a.to(tl.float32) * 0.001953125, normal)  # steps of 2^-9
        value = tl.where(a == 0x7F, float("nan"), value)
        return (value.to(tl.int32, bitcast=True) | ((wide & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def quantized(x, amax_bits, POW2: tl.constexpr, HARDWARE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the bytes of x, and the scale; ``amax_bits`` is broadcast against x."""
    scale = scale_of(amax_bits, POW2)
    return encode(divided(x, scale, POW2), HARDWARE), scale


# ---- Device functions of the quantizers: load a tile, quantize it in groups along its rows or columns, store it

@triton.jit
def load_tile(x, m, k, M, K, x_m, HARDWARE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load the tile of x at rows m and columns k as FP32, zero outside; ``x_m`` is the row stride."""
    at = x + m.to(tl.int64)[:, None] * x_m + k[None, :]
    return widened(tl.load(at, mask=(m < M)[:, None] & (k < K)[None, :], other=0.0), HARDWARE)


@triton.jit
def store_rows(x, q, s, m, g, M, K, s_m, s_g, POW2: tl.constexpr, HARDWARE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Quantize and store a tile [rows, 128] (FP32, zero outside) of group ``g``, with one scale per row."""
    codes, scale = quantized(x, tl.max(magnitude(x), 1, keep_dims=True), POW2, HARDWARE)
    k = g * 128 + tl.arange(0, 128)
    row = m.to(tl.int64)[:, None]
    tl.store(q + row * K + k[None, :], codes, mask=(m < M)[:, None] & (k < K)[None, :])
    tl.store(s + row * s_m + g * s_g, scale, mask=(m < M)[:, None])


@triton.jit
def store_tokens(x, q, s, g, k, K, pitch, POW2: tl.constexpr, HARDWARE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Quantize a tile [128 tokens, columns] (FP32, zero outside) of group ``g``, with one scale per column. Store its transpose.

    ``pitch`` is the length of a row of q.
    """
    codes, scale = quantized(x, tl.max(magnitude(x), 0, keep_dims=True), POW2, HARDWARE)
    m = g * 128 + tl.arange(0, 128)
    at = q + k.to(tl.int64)[:, None] * pitch + m[None, :]
    tl.store(at, tl.trans(codes), mask=(k < K)[:, None] & (m < pitch)[None, :])
    tl.store(s + g.to(tl.int64) * K + k[None, :], scale, mask=(k < K)[None, :])


# ---- The host side of the quantizers: checks of the input, output tensors, launch options --------

#: no fusion, as for the GEMMs, and instructions scheduled for few registers: tiles are wide and each element passes through many
#: operations, so a SiLU tile would spill otherwise. Older versions of triton lack ``sched4reg``
COMPILER = {**PINNED, **({"sched4reg": True} if "sched4reg" in CUDAOptions.__dataclass_fields__ else {})}


def check_input(name: str, x: Tensor, *dtypes: torch.dtype) -> None:
    """Check an input before a kernel reads it: [rows, columns] with contiguous rows, on a device that Triton runs on.

    Raises:
        TypeError: the dtype is not one of ``dtypes`` (BF16 by default).
        ValueError: the tensor is not two-dimensional, its rows are not contiguous, or it is not on the current device.
        ConfigError: the device is a CPU and the interpreter is off.
    """
    dtypes, what = dtypes or (torch.bfloat16,), f"the quantizer's {name}"
    if x.dtype not in dtypes:
        wanted = " or ".join(map(str, dtypes))
        raise TypeError(explain(what, required=wanted, found=x.dtype, fix="convert it first"))
    if x.dim() != 2:
        raise ValueError(explain(what, required="two dimensions", found=list(x.shape), fix="flatten the batch first"))
    if x.shape[0] and x.shape[1] > 1 and x.stride(1) != 1:  # nothing reads an empty tensor, which ``contiguous`` leaves alone
        found = f"strides {list(x.stride())}"
        raise ValueError(explain(what, required="contiguous rows", found=found, fix="call .contiguous() first"))
    check_device(x)


def options(scale_format: ScaleFormat) -> dict[str, Any]:
    """The constants and compiler options of all quantizer kernels. Raises ValueError for a format without blocks of 128."""
    form = FORMATS.get(scale_format)
    if form is None or form.block != BLOCK:
        what, fix = "the scale format of a kernel for blocks of 128", "use one of these"
        raise ValueError(explain(what, required="pow2 or fp32", found=repr(scale_format), fix=fix))
    return {"POW2": form.powers_of_two, "HARDWARE": not triton.knobs.runtime.interpret, **COMPILER}


def new_rows(x: Tensor, M: int, K: int, columns: bool = False) -> tuple[Tensor, Tensor]:
    """Allocate uint8 [M, K] and FP32 [M, G]. With ``columns``, the scales have strides (1, M rounded up to 4), not (G, 1)."""
    q, G = torch.empty(M, K, dtype=torch.uint8, device=x.device), groups(K)
    if columns:
        return q, torch.empty(G, -(-M // 4) * 4, dtype=torch.float32, device=x.device)[:, :M].t()
    return q, torch.empty(M, G, dtype=torch.float32, device=x.device)


def new_tokens(x: Tensor, M: int, K: int) -> tuple[Tensor, Tensor]:
    """Allocate uint8 [K, M rounded up to whole groups] and FP32 [ceil(M / 128), K]."""
    s = torch.empty(groups(M), K, dtype=torch.float32, device=x.device)
    return torch.empty(K, groups(M) * BLOCK, dtype=torch.uint8, device=x.device), s
