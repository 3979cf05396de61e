"""DGrad on Hopper: dX [M, K] = dY W, contracted over N in blocks of 128.

    dY e4m3 [M, N] row-major, s [M, ceil(N/128)];  W e4m3 [N, K] row-major, s blocks [ceil(N/128), ceil(K/128)]

W is the same tensor as in FProp, so the weight is stored once. ``wgmma`` needs the contraction dimension contiguous but W has
K contiguous, so the compiler transposes each 128 x 128 box in shared memory. A box has one weight scale.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl_patch.fp8.formats import BLOCK, groups
from jetrl_patch.kernels.aot import Spec
from jetrl_patch.kernels.gemm_common import (
    PINNED,
    box,
    check_device,
    check_operand,
    check_output,
    converted,
    descriptor,
    place,
    programs,
)

ROWS, WARPS, STAGES, HEIGHT = 128, 8, 4, 8


@triton.jit(do_not_specialize=["M", "programs"])  # one binary for every batch
def dgrad_kernel(  # type: ignore[no-untyped-def]
    g_MN, w_NK, sg, sw, dx, M, N, K, sg_m, sg_g, sw_n, sw_k, programs,
    ROWS: tl.constexpr, STAGES: tl.constexpr, HEIGHT: tl.constexpr,
):  # fmt: skip
    """``g_MN`` and ``w_NK`` are TMA descriptors with boxes of ROWS x 128 and 128 x 128."""
    rows, columns = tl.cdiv(M, ROWS), tl.cdiv(K, 128)
    for tile in tl.range(tl.program_id(0), rows * columns, programs):
        row, column = place(tile, rows, columns, HEIGHT)
        m = row * ROWS + tl.arange(0, ROWS)
        k = column * 128 + tl.arange(0, 128)
        sg_at = sg + tl.minimum(m, M - 1) * sg_m
        acc = tl.zeros((ROWS, 128), tl.float32)
        for nb in tl.range(0, tl.cdiv(N, 128), num_stages=STAGES):
            g = g_MN.load([row * ROWS, nb * 128])
            w = w_NK.load([nb * 128, column * 128])
            scale = tl.load(sg_at + nb * sg_g) * tl.load(sw + nb * sw_n + column * sw_k)
            acc = tl.fma(tl.dot(g, w), scale[:, None], acc)
        at = dx + m.to(tl.int64)[:, None] * K + k[None, :]
        tl.store(at, converted(acc, dx), mask=(m < M)[:, None] & (k < K)[None, :])


def dgrad(g_MN: Tensor, s_MG: Tensor, w_NK: Tensor, s_blocks: Tensor, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """dX [M, K] in BF16 or FP32 from quantized operands; ``fp8.reference.dgrad`` is the reference.

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
    if dx.numel() == 0:
        return dx
    grid = programs(g_MN.device, -(-M // ROWS) * groups(K), 1)
    dgrad_kernel[grid](
        descriptor(g_MN, ROWS), descriptor(w_NK, BLOCK), s_MG, s_blocks, dx, M, N, K, *s_MG.stride(), *s_blocks.stride(),
        grid[0], ROWS=ROWS, STAGES=STAGES, HEIGHT=HEIGHT, num_warps=WARPS, num_stages=STAGES, **PINNED,
    )  # fmt: skip
    return dx


KERNELS = tuple(
    Spec(
        name=f"dgrad_{ROWS}x128_{out}",
        kernel=dgrad_kernel,
        types={
            "g_MN": box(ROWS), "w_NK": box(BLOCK), "sg": "*fp32", "sw": "*fp32", "dx": f"*{out}",
            **dict.fromkeys(("M", "N", "K", "sg_m", "sg_g", "sw_n", "sw_k", "programs"), "i32"),
        },
        constexprs={"ROWS": ROWS, "STAGES": STAGES, "HEIGHT": HEIGHT},
        options={"num_warps": WARPS, "num_stages": STAGES, **PINNED},
        aligned=("N", "K"),
    )
    for out in ("bf16", "fp32")
)  # fmt: skip
