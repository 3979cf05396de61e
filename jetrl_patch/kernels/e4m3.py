"""Scales, e4m3fn bytes and BF16 rounding on the device, bit-equal to ``fp8.quantize``.

Everything uses bit operations or correctly rounded arithmetic, so that a GPU and the interpreter, whose casts are wrong,
give the same result. ``HARDWARE`` selects the GPU's conversions instead (``cvt.rn.satfinite.e4m3x2.f32``,
``cvt.rn.bf16x2.f32``). Both ways turn every NaN into the byte 0x7f.
"""

from __future__ import annotations

import triton
import triton.language as tl

# the bits of 1e-10, the amax floor, and of infinity
_FLOOR = tl.constexpr(0x2EDBE6FF)
_INF = tl.constexpr(0x7F800000)


@triton.jit
def magnitude(x):  # type: ignore[no-untyped-def]
    """The bits of |x| for FP32 x. They compare like integers, with NaN above everything, so a maximum keeps a NaN."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_of(amax_bits, POW2: tl.constexpr):  # type: ignore[no-untyped-def]
    """``fp8.quantize.scale_from_amax`` on the ``magnitude`` of an amax, with IEEE division, not ``div.full``.

    A power of two needs no division: 448 is 1.75 * 2^8, so the exponent drops by 8, or by 7 if the mantissa is above 1.75.
    (A quotient just above 1 does not round down to 1: one more mantissa bit is 2^-23 / 1.75, more than half a bit.)
    """
    bits = tl.where(amax_bits < _FLOOR, _FLOOR, amax_bits)
    if POW2:
        up = ((bits + 0x1FFFFF) & _INF) - (8 << 23)
        return tl.where(bits < _INF, up, bits).to(tl.float32, bitcast=True)
    else:
        return tl.math.div_rn(bits.to(tl.float32, bitcast=True), 448.0)


@triton.jit
def divided(x, scale, POW2: tl.constexpr):  # type: ignore[no-untyped-def]
    """x / scale, correctly rounded; ``scale`` is broadcast against x and has one value per group.

    A power of two between 2^-42 (from the floor) and 2^120 has an exact, normal reciprocal with the negated exponent.
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
    """Convert BF16 (or FP32) to FP32, exactly. Uses bits, because the interpreter's conversion is wrong for subnormals."""
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
        normal = (
            a + 0x7FFFF + ((a >> 20) & 1) - 0x3C000000
        ) >> 20  # mantissa 23 -> 3 bits, exponent bias 127 -> 7
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
