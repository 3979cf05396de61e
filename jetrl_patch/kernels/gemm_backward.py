"""DGrad and WGrad in FP8 ``wgmma``."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl_patch.kernels.formats import FP8, check_operand, groups
from jetrl_patch.kernels.gemm import launch
from jetrl_patch.kernels.gemm_common import (
    ALIGN,
    PINNED,
    WIDE,
    check_device,
    converted,
    descriptor,
    new_output,
    place,
    programs,
)

# ---- DGrad on Hopper: dX [M, K] = dY W, contracted over N in blocks of 128 -----------------------
#     dY e4m3 [M, N] row-major, s [M, ceil(N/128)];  W e4m3 [N, K] row-major, s blocks [ceil(N/128), ceil(K/128)]
#
# ``wgmma`` needs the contraction dimension contiguous, but W has K contiguous. So W^T [K, N] is written first, which moves 2
# bytes per element, unless the quantizer wrote it along with W. The product is then FProp's: dX = dY (W^T)^T, with block scales.
# Without W^T, the compiler would transpose each box of W in shared memory, byte by byte and once for every tile of dX: 64 byte
# stores per thread in a loop of 320 instructions. FProp's loop has 200.

#: the tile for every K, because a training batch has many rows
TILE = WIDE
#: warps that transpose a tile of 128 x 128 bytes
WARPS = 8


@triton.jit
def transpose_kernel(w, transposed, N, K, w_n, pitch):  # type: ignore[no-untyped-def]
    """Write the bytes of each matrix [N, K] of a stack as [K, pitch], with zeros past N. Matrices are N rows apart."""
    G, blocks = tl.cdiv(K, 128), tl.cdiv(N, 128) * tl.cdiv(K, 128)
    matrix, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    n = (block // G) * 128 + tl.arange(0, 128)
    k = (block % G) * 128 + tl.arange(0, 128)
    at = w + (matrix * N + n[:, None]) * w_n + k[None, :]
    tile = tl.load(at, mask=(n < N)[:, None] & (k < K)[None, :], other=0)
    at = transposed + (matrix * K + k[:, None]) * pitch + n[None, :]
    tl.store(at, tl.trans(tile), mask=(k < K)[:, None] & (n < pitch)[None, :])


def transposed(w_NK: Tensor) -> Tensor:
    """W^T, e4m3 [K, N], in rows that start at multiples of 16 bytes, as TMA needs. For a stack [S, N, K], that of each matrix."""
    if w_NK.stride(-1) != 1 or w_NK.dim() > 2:
        w_NK = w_NK.contiguous()
    *stack, N, K = w_NK.shape
    pitch = -(-N // ALIGN) * ALIGN
    made = torch.empty(*stack, K, pitch, dtype=torch.uint8, device=w_NK.device)
    transpose_kernel[(math.prod(stack) * groups(N) * groups(K),)](
        w_NK.view(torch.uint8), made, N, K, w_NK.stride(-2), pitch, num_warps=WARPS, **PINNED
    )
    return made.view(FP8)[..., :N]


def dgrad(
    g_MN: Tensor, s_MG: Tensor, w_NK: Tensor, s_blocks: Tensor, out_dtype: torch.dtype = torch.bfloat16,
    w_KN: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """dX [M, K] in BF16 or FP32; ``Backend.dgrad`` is the reference. ``w_KN`` is ``transposed(w_NK)``, if it exists already."""
    (M, N), K = g_MN.shape, w_NK.shape[1]
    if w_NK.shape[0] != N:
        raise ValueError(f"dY {list(g_MN.shape)} and W {list(w_NK.shape)} differ in N")
    check_operand("dY", g_MN, s_MG, (M, groups(N)))
    check_operand("W", w_NK, s_blocks, (groups(N), groups(K)))
    dx = new_output((M, K), out_dtype, g_MN, s_MG, w_NK, s_blocks)
    if dx.numel():
        launch(g_MN, s_MG, transposed(w_NK) if w_KN is None else w_KN, s_blocks.t(), dx, TILE, blocks=True)
    return dx


# ---- WGrad on Hopper: dW [N, K] = dY^T X, contracted over the tokens in groups of 128 ------------
#     dY^T e4m3 [N, M] row-major, s [ceil(M/128), N];  X^T e4m3 [K, M] row-major, s [ceil(M/128), K]
#
# The quantizer writes both operands transposed, with the tokens contiguous, as FP8 ``wgmma`` needs. Each row has one scale per
# 128 tokens. Adding the sum to an FP32 main gradient in place saves one rounding and one buffer.

SIDE, WGRAD_WARPS, STAGES, HEIGHT = 128, 8, 4, 8


@triton.jit(do_not_specialize=["M"])  # one binary for every batch
def wgrad_kernel(  # type: ignore[no-untyped-def]
    g_NM, x_KM, sg, sx, dw, M, N, K, sg_g, sg_n, sx_g, sx_k, programs,
    ADD: tl.constexpr, SIDE: tl.constexpr, STAGES: tl.constexpr, HEIGHT: tl.constexpr,
):  # fmt: skip
    """``g_NM`` and ``x_KM`` are TMA descriptors with boxes of SIDE x 128; ADD accumulates into ``dw``."""
    rows, columns = tl.cdiv(N, SIDE), tl.cdiv(K, SIDE)
    for tile in tl.range(tl.program_id(0), rows * columns, programs):
        row, column = place(tile, rows, columns, HEIGHT)
        n = row * SIDE + tl.arange(0, SIDE)
        k = column * SIDE + tl.arange(0, SIDE)
        sg_at, sx_at = sg + n * sg_n, sx + k * sx_k
        acc = tl.zeros((SIDE, SIDE), tl.float32)
        for mb in tl.range(0, tl.cdiv(M, 128), num_stages=STAGES):
            g = g_NM.load([row * SIDE, mb * 128])
            x = x_KM.load([column * SIDE, mb * 128])
            sg_here = tl.load(sg_at + mb * sg_g, mask=n < N, other=0.0)  # a mask, because a clamp hides that they are adjacent
            sx_here = tl.load(sx_at + mb * sx_g, mask=k < K, other=0.0)
            scale = sg_here[:, None] * sx_here[None, :]
            acc = tl.fma(tl.dot(g, x.T), scale, acc)
        at = dw + n.to(tl.int64)[:, None] * K + k[None, :]
        inside = (n < N)[:, None] & (k < K)[None, :]
        if ADD:
            acc = tl.load(at, mask=inside, other=0.0) + acc
        tl.store(at, converted(acc, dw), mask=inside)


def wgrad(
    g_NM: Tensor, sg: Tensor, x_KM: Tensor, sx: Tensor, out_dtype: torch.dtype = torch.bfloat16, add_to: Tensor | None = None
) -> Tensor:
    """dW [N, K] in BF16 or FP32 from transposed operands; ``Backend.wgrad`` is the reference.

    Args:
        g_NM: e4m3 [N, M] with scales ``sg`` [ceil(M/128), N].
        x_KM: e4m3 [K, M] with scales ``sx`` [ceil(M/128), K].
        add_to: a contiguous FP32 main gradient [N, K], which is updated in place and returned.
    """
    (N, M), K = g_NM.shape, x_KM.shape[0]
    if x_KM.shape[1] != M:
        raise ValueError(f"dY^T {list(g_NM.shape)} and X^T {list(x_KM.shape)} differ in the number of tokens")
    check_operand("dY^T", g_NM, sg.t(), (N, groups(M)))
    check_operand("X^T", x_KM, sx.t(), (K, groups(M)))
    if add_to is None:
        dw = new_output((N, K), out_dtype, g_NM, sg, x_KM, sx)
    else:
        check_device(add_to, g_NM, sg, x_KM, sx)
        if add_to.dtype != torch.float32 or add_to.shape != (N, K) or not add_to.is_contiguous():
            raise ValueError(
                f"a main gradient must be torch.float32, [{N}, {K}] and contiguous, found {add_to.dtype}, "
                f"{list(add_to.shape)}, strides {list(add_to.stride())}"
            )
        dw = add_to
    if dw.numel() == 0 or M == 0:
        return dw if add_to is not None else dw.zero_()
    grid = programs(g_NM.device, -(-N // SIDE) * -(-K // SIDE), 1)
    wgrad_kernel[grid](
        descriptor(g_NM, SIDE), descriptor(x_KM, SIDE), sg, sx, dw, M, N, K, *sg.stride(), *sx.stride(),
        grid[0], ADD=add_to is not None, SIDE=SIDE, STAGES=STAGES, HEIGHT=HEIGHT, num_warps=WGRAD_WARPS, num_stages=STAGES,
        **PINNED,
    )  # fmt: skip
    return dw
