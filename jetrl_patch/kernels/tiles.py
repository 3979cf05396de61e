"""Device functions of the quantizers: load a tile, quantize it in groups along its rows or columns, store it."""

from __future__ import annotations

import triton
import triton.language as tl

from jetrl_patch.kernels.e4m3 import magnitude, quantized, widened


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
def store_tokens(  # type: ignore[no-untyped-def]
    x, q, s, g, k, M, K, pitch, TURNED: tl.constexpr, POW2: tl.constexpr, HARDWARE: tl.constexpr
):
    """Quantize and store a tile [128 tokens, columns] (FP32, zero outside) of group ``g``, with one scale per column.

    With TURNED, ``pitch`` is the length of a row of q, and tokens past M count as zero.
    """
    codes, scale = quantized(x, tl.max(magnitude(x), 0, keep_dims=True), POW2, HARDWARE)
    m = g * 128 + tl.arange(0, 128)
    if TURNED:
        at = q + k.to(tl.int64)[:, None] * pitch + m[None, :]
        tl.store(at, tl.trans(codes), mask=(k < K)[:, None] & (m < pitch)[None, :])
    else:
        at = q + m.to(tl.int64)[:, None] * pitch + k[None, :]
        tl.store(at, codes, mask=(m < M)[:, None] & (k < K)[None, :])
    tl.store(s + g.to(tl.int64) * K + k[None, :], scale, mask=(k < K)[None, :])
