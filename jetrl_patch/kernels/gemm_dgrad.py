"""DGrad on Hopper: dX [M, K] = dY W, contracted over N in blocks of 128.

    dY e4m3 [M, N] row-major, s [M, ceil(N/128)];  W e4m3 [N, K] row-major, s blocks [ceil(N/128), ceil(K/128)]

``wgmma`` needs the contraction dimension contiguous, but W has K contiguous. So W^T [K, N] is written first, 2 bytes an element,
unless the quantizer wrote it beside W, and the product is FProp's: dX = dY (W^T)^T, with block scales. Without that the compiler
turns each box of W in shared memory, byte by byte and once for every tile of dX: 64 byte stores a thread in a loop of 320
instructions, where FProp's has 200.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl_patch.fp8.formats import FP8, groups
from jetrl_patch.kernels.aot import Spec
from jetrl_patch.kernels.gemm import launch
from jetrl_patch.kernels.gemm_common import ALIGN, PINNED, WIDE, check_device, check_operand, check_output

#: the tile, whatever K: a training batch has many rows
TILE = WIDE
#: warps that turn a tile of 128 x 128 bytes
WARPS = 8


@triton.jit
def turn_kernel(w, turned, N, K, w_n, pitch):  # type: ignore[no-untyped-def]
    """Write the bytes of each [N, K] of a stack as [K, pitch]; columns past N are zero. Matrices are N rows apart."""
    G, blocks = tl.cdiv(K, 128), tl.cdiv(N, 128) * tl.cdiv(K, 128)
    matrix, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    n = (block // G) * 128 + tl.arange(0, 128)
    k = (block % G) * 128 + tl.arange(0, 128)
    at = w + (matrix * N + n[:, None]) * w_n + k[None, :]
    tile = tl.load(at, mask=(n < N)[:, None] & (k < K)[None, :], other=0)
    at = turned + (matrix * K + k[:, None]) * pitch + n[None, :]
    tl.store(at, tl.trans(tile), mask=(k < K)[:, None] & (n < pitch)[None, :])


def turned(w_NK: Tensor) -> Tensor:
    """W^T, e4m3 [K, N], in rows that start at multiples of 16 bytes, as TMA reads them; of a stack [S, N, K] each matrix's."""
    if w_NK.stride(-1) != 1 or w_NK.dim() > 2:
        w_NK = w_NK.contiguous()
    *stack, N, K = w_NK.shape
    pitch = -(-N // ALIGN) * ALIGN
    made = torch.empty(*stack, K, pitch, dtype=torch.uint8, device=w_NK.device)
    turn_kernel[(math.prod(stack) * groups(N) * groups(K),)](
        w_NK.view(torch.uint8), made, N, K, w_NK.stride(-2), pitch, num_warps=WARPS, **PINNED
    )
    return made.view(FP8)[..., :N]


def dgrad(
    g_MN: Tensor,
    s_MG: Tensor,
    w_NK: Tensor,
    s_blocks: Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    w_KN: Tensor | None = None,
) -> Tensor:
    """dX [M, K] in BF16 or FP32 from quantized operands; ``fp8.reference.dgrad`` is the reference.

    Args:
        w_KN: ``turned(w_NK)``, if it is at hand.

    Raises:
        TypeError, ValueError: the operands do not match.
        ConfigError: the device is not a CUDA device.
    """
    check_output(out_dtype)
    (M, N), K = g_MN.shape, w_NK.shape[1]
    if w_NK.shape[0] != N:
        raise ValueError(f"dY {list(g_MN.shape)} and W {list(w_NK.shape)} differ in N")
    check_operand("dY", g_MN, s_MG, (M, groups(N)))
    check_operand("W", w_NK, s_blocks, (groups(N), groups(K)))
    check_device(g_MN, s_MG, w_NK, s_blocks)
    dx = torch.empty(M, K, dtype=out_dtype, device=g_MN.device)
    if dx.numel():
        launch(g_MN, s_MG, turned(w_NK) if w_KN is None else w_KN, s_blocks.t(), dx, TILE, blocks=True)
    return dx


KERNELS = (
    Spec(
        "turn", turn_kernel, {"w": "*u8", "turned": "*u8"} | dict.fromkeys(("N", "K", "w_n", "pitch"), "i32"), {},
        {"num_warps": WARPS, **PINNED}, ("N", "K", "w_n", "pitch"),
    ),
)  # fmt: skip
