"""The quantizers of ``backends.quantize`` as bit-equal Triton kernels that read their input once.

    rows    1x128 along K     q [M, K]                         s [M, G]
    tokens  128x1 along M     q transposed, [K, M]             s [ceil(M / 128), K]
    both    both in one read: DGrad's operand [M, K] and WGrad's [K, M]
    weight  128x128 blocks    q [N, K], also as [K, N]         s [ceil(N / 128), G]

G = ceil(K / 128). Matrices are row-major. Elements outside count as zero. The tiling never affects a bit: a group's scale comes
from a maximum, which does not depend on order, and everything else is elementwise. Every function raises what
``common.check_input`` raises.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl_patch.config.formats import ScaleFormat
from jetrl_patch.errors import explain
from jetrl_patch.kernels.common import (
    bf16_value,
    check_input,
    decode,
    load_tile,
    magnitude,
    new_rows,
    new_tokens,
    options,
    quantized,
    store_rows,
    store_tokens,
)
from jetrl_patch.kernels.formats import FP8, groups
from jetrl_patch.kernels.gemm_common import ALIGN

#: rows per tile of one group; fewer for up to ``FEW`` tokens, to occupy more SMs
ROWS, FEW_ROWS, FEW = 32, 4, 1024
#: columns per tile of 128 tokens
COLUMNS = 64
#: warps per tile of 128 x 128. With fewer, a thread would need too many registers
BOTH_WARPS = 16
#: warps per block of a weight that is written once, and if it is also written transposed
WEIGHT_WARPS = 8, BOTH_WARPS


@triton.jit(do_not_specialize=["M", "s_g"])  # one binary for every batch
def rows_kernel(  # type: ignore[no-untyped-def]
    x, q, s, M, K, x_m, s_m, s_g, ROWS: tl.constexpr, POW2: tl.constexpr, HARDWARE: tl.constexpr
):
    G = tl.cdiv(K, 128)
    m = (tl.program_id(0) // G) * ROWS + tl.arange(0, ROWS)
    g = tl.program_id(0) % G
    tile = load_tile(x, m, g * 128 + tl.arange(0, 128), M, K, x_m, HARDWARE)
    store_rows(tile, q, s, m, g, M, K, s_m, s_g, POW2, HARDWARE)


@triton.jit(do_not_specialize=["M"])  # one binary for every batch
def tokens_kernel(  # type: ignore[no-untyped-def]
    x, q, s, M, K, x_m, pitch, COLUMNS: tl.constexpr, POW2: tl.constexpr, HARDWARE: tl.constexpr
):
    columns = tl.cdiv(K, COLUMNS)
    g = tl.program_id(0) // columns
    k = (tl.program_id(0) % columns) * COLUMNS + tl.arange(0, COLUMNS)
    tile = load_tile(x, g * 128 + tl.arange(0, 128), k, M, K, x_m, HARDWARE)
    store_tokens(tile, q, s, g, k, K, pitch, POW2, HARDWARE)


@triton.jit(do_not_specialize=["M", "s_g"])  # one binary for every batch
def both_kernel(  # type: ignore[no-untyped-def]
    x, q, s, qt, st, M, K, x_m, s_m, s_g, pitch, POW2: tl.constexpr, HARDWARE: tl.constexpr
):
    G = tl.cdiv(K, 128)
    gm, gk = tl.program_id(0) // G, tl.program_id(0) % G
    m, k = gm * 128 + tl.arange(0, 128), gk * 128 + tl.arange(0, 128)
    tile = load_tile(x, m, k, M, K, x_m, HARDWARE)
    store_rows(tile, q, s, m, gk, M, K, s_m, s_g, POW2, HARDWARE)
    store_tokens(tile, qt, st, gm, k, K, pitch, POW2, HARDWARE)


@triton.jit
def weight_kernel(  # type: ignore[no-untyped-def]
    w, q, s, qt, N, K, w_n, pitch, TRANSPOSED: tl.constexpr, POW2: tl.constexpr, HARDWARE: tl.constexpr
):
    """A block of one matrix of a stack, whose matrices are N rows apart. TRANSPOSED also writes the bytes as [K, pitch]."""
    G, blocks = tl.cdiv(K, 128), tl.cdiv(N, 128) * tl.cdiv(K, 128)
    matrix, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    n = (block // G) * 128 + tl.arange(0, 128)
    k = (block % G) * 128 + tl.arange(0, 128)
    tile = load_tile(w + matrix * N * w_n, n, k, N, K, w_n, HARDWARE)
    if w.dtype.element_ty == tl.float32:
        tile = bf16_value(tile, HARDWARE)  # a master weight is quantized from its BF16 value
    codes, scale = quantized(tile, tl.max(tl.max(magnitude(tile), 1), 0), POW2, HARDWARE)
    tl.store(q + (matrix * N + n[:, None]) * K + k[None, :], codes, mask=(n < N)[:, None] & (k < K)[None, :])
    tl.store(s + tl.program_id(0), scale)
    if TRANSPOSED:
        at = qt + (matrix * K + k[:, None]) * pitch + n[None, :]
        tl.store(at, tl.trans(codes), mask=(k < K)[:, None] & (n < pitch)[None, :])


def quantize_rows(x_MK: Tensor, scale_format: ScaleFormat, columns: bool = False) -> tuple[Tensor, Tensor]:
    """As ``backends.quantize.quantize_activation``: e4m3 [M, K] and FP32 [M, G].

    Args:
        x_MK: BF16 with contiguous rows; any row stride.
        columns: the scales get strides (1, M rounded up to 4), as the libraries read them, instead of (G, 1).
    """
    check_input("x", x_MK)
    fixed, (M, K) = options(scale_format), x_MK.shape
    q, s = new_rows(x_MK, M, K, columns)
    if q.numel():
        rows, warps = (ROWS, 4) if M > FEW else (FEW_ROWS, 1)
        grid = (-(-M // rows) * groups(K),)
        rows_kernel[grid](x_MK, q, s, M, K, x_MK.stride(0), *s.stride(), ROWS=rows, num_warps=warps, **fixed)
    return q.view(FP8), s


def quantize_transposed(x_MK: Tensor, scale_format: ScaleFormat) -> tuple[Tensor, Tensor]:
    """As ``backends.quantize.quantize_tokens``, in WGrad's layout: e4m3 [K, ceil(M / 128) * 128] and FP32 [ceil(M / 128), K].

    Tokens past M are zero. Rows of BF16 x are contiguous, with any row stride.
    """
    check_input("x", x_MK)
    fixed, (M, K) = options(scale_format), x_MK.shape
    q, s = new_tokens(x_MK, M, K)
    if q.numel():
        grid = (groups(M) * -(-K // COLUMNS),)
        tokens_kernel[grid](x_MK, q, s, M, K, x_MK.stride(0), q.stride(0), COLUMNS=COLUMNS, num_warps=4, **fixed)
    return q.view(FP8), s


def quantize_both(
    x_MK: Tensor, scale_format: ScaleFormat, columns: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Two layouts from one read: (q, s) of ``quantize_rows``, and (q, s) of ``quantize_transposed``."""
    check_input("x", x_MK)
    fixed, (M, K) = options(scale_format), x_MK.shape
    (q, s), (qt, st) = new_rows(x_MK, M, K, columns), new_tokens(x_MK, M, K)
    if q.numel():
        grid = (groups(M) * groups(K),)
        both_kernel[grid](
            x_MK, q, s, qt, st, M, K, x_MK.stride(0), *s.stride(), qt.stride(0), num_warps=BOTH_WARPS, **fixed
        )
    return q.view(FP8), s, qt.view(FP8), st


def quantize_weight(w_NK: Tensor, scale_format: ScaleFormat) -> tuple[Tensor, Tensor]:
    """As ``backends.quantize.quantize_weight``: e4m3 [N, K] and FP32 [ceil(N / 128), G], from BF16 or an FP32 master.

    A stack [S, N, K] takes one launch: each matrix has its own blocks, FP32 [S, ceil(N / 128), G].
    """
    return _weight(w_NK, scale_format, transposed=False)[:2]


def quantize_weight_transposed(w_NK: Tensor, scale_format: ScaleFormat) -> tuple[Tensor, Tensor, Tensor]:
    """``quantize_weight``, and ``gemm_backward.transposed`` of its bytes, e4m3 [K, N], from one read of W."""
    return _weight(w_NK, scale_format, transposed=True)


def _weight(w_NK: Tensor, scale_format: ScaleFormat, transposed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """With ``transposed``, the third tensor is W^T, in rows of ``pitch`` bytes."""
    *stack, N, K = w_NK.shape
    w_RK = w_NK.flatten(0, 1) if stack else w_NK
    check_input("weight", w_RK, torch.bfloat16, torch.float32)
    fixed = options(scale_format)
    q = torch.empty(w_NK.shape, dtype=torch.uint8, device=w_NK.device)
    s = torch.empty(*stack, groups(N), groups(K), dtype=torch.float32, device=w_NK.device)
    pitch = -(-N // ALIGN) * ALIGN
    qt = torch.empty(*stack, K, pitch, dtype=torch.uint8, device=w_NK.device) if transposed else q
    if q.numel():
        weight_kernel[(s.numel(),)](
            w_RK, q, s, qt, N, K, w_RK.stride(0), pitch, TRANSPOSED=transposed, num_warps=WEIGHT_WARPS[transposed], **fixed
        )
    return q.view(FP8), s, qt.view(FP8)[..., :N]


# ---- Requantize a saved FP8 activation in groups of 128 tokens: WGrad's operand, without the BF16 values in memory
# X e4m3 [M, K] with s [M, G] in 1x128 groups -> X^T e4m3 [K, M] with s [ceil(M / 128), K]. As in ``NativeBackend.wgrad``, q * s
# is rounded to BF16 (exact with power-of-two scales) and quantized again.

@triton.jit(do_not_specialize=["M", "s_g"])  # one binary for every batch
def requantize_kernel(  # type: ignore[no-untyped-def]
    q, s, qt, st, M, K, q_m, s_m, s_g, pitch, COLUMNS: tl.constexpr, POW2: tl.constexpr, HARDWARE: tl.constexpr
):
    columns = tl.cdiv(K, COLUMNS)
    g = tl.program_id(0) // columns
    k0 = (tl.program_id(0) % columns) * COLUMNS
    m, k = g * 128 + tl.arange(0, 128), k0 + tl.arange(0, COLUMNS)
    row = m.to(tl.int64)
    codes = tl.load(q + row[:, None] * q_m + k[None, :], mask=(m < M)[:, None] & (k < K)[None, :], other=0)
    scale = tl.load(s + row * s_m + (k0 // 128) * s_g, mask=m < M, other=1.0)
    tile = bf16_value(decode(codes, HARDWARE) * scale[:, None], HARDWARE)
    store_tokens(tile, qt, st, g, k, K, pitch, POW2, HARDWARE)


def requantize_tokens(q_MK: Tensor, s_MG: Tensor, scale_format: ScaleFormat) -> tuple[Tensor, Tensor]:
    """e4m3 [K, ceil(M / 128) * 128] and FP32 [ceil(M / 128), K] from e4m3 [M, K] and FP32 [M, G]. Tokens past M are zero.

    The rows of ``q_MK`` are contiguous, with any row stride; ``s_MG`` may have any strides.
    """
    check_input("activation", q_MK, FP8)
    fixed, (M, K) = options(scale_format), q_MK.shape
    if s_MG.shape != (M, groups(K)) or s_MG.dtype != torch.float32 or s_MG.device != q_MK.device:
        required = f"torch.float32 [{M}, {groups(K)}] on {q_MK.device}"
        found, fix = f"{s_MG.dtype} {list(s_MG.shape)} on {s_MG.device}", "pass the pair that the quantizer returned"
        raise ValueError(explain("the activation's scales", required=required, found=found, fix=fix))
    qt, st = new_tokens(q_MK, M, K)
    if qt.numel():
        grid = (groups(M) * -(-K // COLUMNS),)
        requantize_kernel[grid](
            q_MK.view(torch.uint8), s_MG, qt, st, M, K, q_MK.stride(0), *s_MG.stride(), qt.stride(0),
            COLUMNS=COLUMNS, num_warps=4, **fixed,
        )  # fmt: skip
    return qt.view(FP8), st
