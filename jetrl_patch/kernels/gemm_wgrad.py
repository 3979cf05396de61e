"""WGrad on Hopper: dW [N, K] = dY^T X, contracted over the tokens in groups of 128.

    dY^T e4m3 [N, M] row-major, s [ceil(M/128), N];  X^T e4m3 [K, M] row-major, s [ceil(M/128), K]

The quantizer delivers both operands transposed, with the tokens contiguous as FP8 ``wgmma`` needs them; each row has one
scale per 128 tokens. Adding the sum to an FP32 main gradient in place saves one rounding and one buffer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl_patch.fp8.formats import groups
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

SIDE, WARPS, STAGES, HEIGHT = 128, 8, 4, 8


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
            sg_here = tl.load(sg_at + mb * sg_g, mask=n < N, other=0.0)  # a mask, since a clamp hides what lies side by side
            sx_here = tl.load(sx_at + mb * sx_g, mask=k < K, other=0.0)
            scale = sg_here[:, None] * sx_here[None, :]
            acc = tl.fma(tl.dot(g, x.T), scale, acc)
        at = dw + n.to(tl.int64)[:, None] * K + k[None, :]
        inside = (n < N)[:, None] & (k < K)[None, :]
        if ADD:
            acc = tl.load(at, mask=inside, other=0.0) + acc
        tl.store(at, converted(acc, dw), mask=inside)


def wgrad(
    g_NM: Tensor,
    sg: Tensor,
    x_KM: Tensor,
    sx: Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    add_to: Tensor | None = None,
) -> Tensor:
    """dW [N, K] in BF16 or FP32 from transposed operands; ``fp8.reference.wgrad`` is the reference.

    Args:
        g_NM: e4m3 [N, M] with scales ``sg`` [ceil(M/128), N].
        x_KM: e4m3 [K, M] with scales ``sx`` [ceil(M/128), K].
        out_dtype: dtype of a new result.
        add_to: a contiguous FP32 main gradient [N, K]; it is updated in place and returned.

    Raises:
        TypeError, ValueError: the operands do not match.
        ConfigError: the device is not a CUDA device.
    """
    check_output(out_dtype)
    (N, M), K = g_NM.shape, x_KM.shape[0]
    if x_KM.shape[1] != M:
        raise ValueError(f"dY^T {list(g_NM.shape)} and X^T {list(x_KM.shape)} differ in the number of tokens")
    check_operand("dY^T", g_NM, sg.t(), (N, groups(M)))
    check_operand("X^T", x_KM, sx.t(), (K, groups(M)))
    check_device(g_NM, sg, x_KM, sx)
    if add_to is not None:
        if add_to.dtype != torch.float32 or add_to.shape != (N, K) or not add_to.is_contiguous():
            raise ValueError(
                f"a main gradient must be torch.float32, [{N}, {K}] and contiguous, found {add_to.dtype}, "
                f"{list(add_to.shape)}, strides {list(add_to.stride())}"
            )
        check_device(add_to, g_NM)
    dw = torch.empty(N, K, dtype=out_dtype, device=g_NM.device) if add_to is None else add_to
    if dw.numel() == 0 or M == 0:
        return dw if add_to is not None else dw.zero_()
    grid = programs(g_NM.device, -(-N // SIDE) * -(-K // SIDE), 1)
    wgrad_kernel[grid](
        descriptor(g_NM, SIDE), descriptor(x_KM, SIDE), sg, sx, dw, M, N, K, *sg.stride(), *sx.stride(),
        grid[0], ADD=add_to is not None, SIDE=SIDE, STAGES=STAGES, HEIGHT=HEIGHT, num_warps=WARPS, num_stages=STAGES, **PINNED,
    )  # fmt: skip
    return dw


KERNELS = tuple(
    Spec(
        name=f"wgrad_{SIDE}x{SIDE}_{out}" + ("_add" if add else ""),
        kernel=wgrad_kernel,
        types={
            "g_NM": box(SIDE), "x_KM": box(SIDE), "sg": "*fp32", "sx": "*fp32", "dw": f"*{out}",
            **dict.fromkeys(("M", "N", "K", "sg_g", "sx_g", "programs"), "i32"),
        },
        constexprs={"sg_n": 1, "sx_k": 1, "ADD": add, "SIDE": SIDE, "STAGES": STAGES, "HEIGHT": HEIGHT},
        options={"num_warps": WARPS, "num_stages": STAGES, **PINNED},
        aligned=("N", "K", "sg_g", "sx_g"),
    )
    for out, add in (("bf16", False), ("fp32", False), ("fp32", True))
)  # fmt: skip
