"""WGrad of all experts in one launch: dW [E, N, K] = dY^T X over each expert's own tokens, in groups of 128.

    dY^T e4m3 [N, M] row-major, s [M / 128, N];  X^T e4m3 [K, M] row-major, s [M / 128, K];  M = 128 for each group

The groups are those of the ``Plan``: an expert's tokens fill whole groups, and the rest of its last one is zero. Two kernels
write the operands, from values or from saved FP8 bytes, tokens contiguous as ``wgmma`` needs them. An expert's sum is that of
``gemm_wgrad`` over its tokens alone, and zero without any.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl_patch.kernels.aot import Spec
from jetrl_patch.kernels.common import COMPILER, as_fp8, bf16_value, decode, options, store_tokens, widened
from jetrl_patch.kernels.formats import BLOCK, FP8, ScaleFormat
from jetrl_patch.kernels.gemm_backward import HEIGHT, SIDE, STAGES, WGRAD_WARPS
from jetrl_patch.kernels.gemm_common import (
    PINNED,
    box,
    check_device,
    check_output,
    converted,
    descriptor,
    place,
    programs,
)
from jetrl_patch.kernels.mixture import Plan

#: columns of a tile of 128 tokens: a divisor of 128, so that each row of a saved tile has one scale
COLUMNS = 64


@triton.jit
def own_tokens(groups, group):  # type: ignore[no-untyped-def]
    """Positions of the 128 tokens of a group, and which of them there are."""
    p = tl.load(groups + group * 3 + 1) + tl.arange(0, 128)
    return p, p < tl.load(groups + group * 3 + 2)


@triton.jit(do_not_specialize=["E"])
def group_tokens_kernel(  # type: ignore[no-untyped-def]
    x, weights, order, groups, group_first, q, s, E, W, k, x_r, pitch,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, POW2: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """One group and COLUMNS columns of BF16 x [R, W]. TOKENS: a row is a token, times its pair's weight, rounded."""
    columns = tl.cdiv(W, COLUMNS)
    group = tl.program_id(0) // columns
    if group < tl.load(group_first + E):
        p, there = own_tokens(groups, group)
        n = (tl.program_id(0) % columns) * COLUMNS + tl.arange(0, COLUMNS)
        inside = there[:, None] & (n < W)[None, :]
        if TOKENS:
            pair = tl.load(order + p, mask=there, other=0)
            at = x + (pair // k).to(tl.int64)[:, None] * x_r + n[None, :]
            weight = tl.load(weights + pair, mask=there, other=0.0)
            tile = widened(tl.load(at, mask=inside, other=0.0), HARDWARE)
            tile = bf16_value(weight[:, None] * tile, HARDWARE)
        else:
            tile = widened(tl.load(x + p.to(tl.int64)[:, None] * x_r + n[None, :], mask=inside, other=0.0), HARDWARE)
        store_tokens(tile, q, s, group, n, 0, W, pitch, True, POW2, HARDWARE)


@triton.jit(do_not_specialize=["E", "s_g"])  # one binary for every batch
def regroup_kernel(  # type: ignore[no-untyped-def]
    x, sx, order, groups, group_first, q, s, E, W, k, x_r, s_r, s_g, pitch,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, POW2: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """One group and COLUMNS columns of saved bytes [R, W] with 1x128 scales, as ``requantize`` computes them."""
    columns = tl.cdiv(W, COLUMNS)
    group = tl.program_id(0) // columns
    if group < tl.load(group_first + E):
        p, there = own_tokens(groups, group)
        n0 = (tl.program_id(0) % columns) * COLUMNS
        n = n0 + tl.arange(0, COLUMNS)
        source = p
        if TOKENS:
            source = tl.load(order + p, mask=there, other=0) // k
        row = source.to(tl.int64)
        codes = tl.load(x + row[:, None] * x_r + n[None, :], mask=there[:, None] & (n < W)[None, :], other=0)
        scale = tl.load(sx + row * s_r + (n0 // 128) * s_g, mask=there, other=1.0)
        tile = bf16_value(decode(codes, HARDWARE) * scale[:, None], HARDWARE)
        store_tokens(tile, q, s, group, n, 0, W, pitch, True, POW2, HARDWARE)


@triton.jit(do_not_specialize=["E", "programs"])  # one binary for every batch
def grouped_wgrad_kernel(  # type: ignore[no-untyped-def]
    g_NM, x_KM, sg, sx, dw, group_first, E, N, K, programs, SIDE: tl.constexpr, STAGES: tl.constexpr, HEIGHT: tl.constexpr
):
    """``g_NM`` and ``x_KM`` are TMA descriptors with boxes of SIDE x 128."""
    rows, columns = tl.cdiv(N, SIDE), tl.cdiv(K, SIDE)
    for tile in tl.range(tl.program_id(0), E * rows * columns, programs):
        expert = tile // (rows * columns)
        row, column = place(tile % (rows * columns), rows, columns, HEIGHT)
        n = row * SIDE + tl.arange(0, SIDE)
        k = column * SIDE + tl.arange(0, SIDE)
        sg_at, sx_at = sg + n, sx + k
        first, end = tl.load(group_first + expert), tl.load(group_first + expert + 1)
        acc = tl.zeros((SIDE, SIDE), tl.float32)
        for group in tl.range(first, end, num_stages=STAGES):
            g = g_NM.load([row * SIDE, group * 128])
            x = x_KM.load([column * SIDE, group * 128])
            sg_here = tl.load(sg_at + group * N, mask=n < N, other=0.0)
            sx_here = tl.load(sx_at + group * K, mask=k < K, other=0.0)
            scale = sg_here[:, None] * sx_here[None, :]
            acc = tl.fma(tl.dot(g, x.T), scale, acc)
        at = dw + (expert.to(tl.int64) * N + n[:, None]) * K + k[None, :]
        tl.store(at, converted(acc, dw), mask=(n < N)[:, None] & (k < K)[None, :])


Operand = tuple[Tensor, Tensor]


def _new(x: Tensor, plan: Plan) -> tuple[Tensor, Tensor, tuple[int]]:
    """Bytes [W, M], scales [M / 128, W], and the grid of the kernel that writes them."""
    bound, W = plan.groups.entries.shape[0], x.shape[1]
    q = torch.empty(W, bound * BLOCK, dtype=torch.uint8, device=x.device)
    s = torch.empty(bound, W, dtype=torch.float32, device=x.device)
    return q, s, (bound * -(-W // COLUMNS),)


def group_tokens(x_RW: Tensor, plan: Plan, scale_format: ScaleFormat, weights_Tk: Tensor | None = None) -> Operand:
    """dY^T of BF16 rows, one for each position; with ``weights_Tk`` (FP32, contiguous) one for each token, times the weight."""
    check_device(x_RW, plan.order)
    fixed, (q, s, grid) = options(x_RW, scale_format), _new(x_RW, plan)
    tokens = weights_Tk is not None
    if q.numel():
        group_tokens_kernel[grid](
            x_RW, weights_Tk if tokens else s, plan.order, plan.groups.entries, plan.groups.first, q, s, plan.experts,
            x_RW.shape[1], plan.ids.shape[1], x_RW.stride(0), q.stride(0), TOKENS=tokens, COLUMNS=COLUMNS, num_warps=4, **fixed,
        )  # fmt: skip
    return as_fp8(q), s


def regroup(q_RW: Tensor, s_RG: Tensor, plan: Plan, scale_format: ScaleFormat, tokens: bool) -> Operand:
    """X^T of saved FP8 rows, one for each position, or with ``tokens`` one for each token."""
    check_device(q_RW, s_RG, plan.order)
    fixed, (q, s, grid) = options(q_RW, scale_format), _new(q_RW, plan)
    if q.numel():
        regroup_kernel[grid](
            q_RW.view(torch.uint8), s_RG, plan.order, plan.groups.entries, plan.groups.first, q, s, plan.experts, q_RW.shape[1],
            plan.ids.shape[1], q_RW.stride(0), *s_RG.stride(), q.stride(0),
            TOKENS=tokens, COLUMNS=COLUMNS, num_warps=4, **fixed,
        )  # fmt: skip
    return as_fp8(q), s


def grouped_wgrad(g: Operand, x: Operand, plan: Plan, out_dtype: torch.dtype) -> Tensor:
    """dW [E, N, K] in BF16 or FP32 from the operands of ``group_tokens`` and ``regroup``.

    Raises:
        TypeError, ValueError: the operands do not match.
        ConfigError: the device is not a CUDA device.
    """
    check_output(out_dtype)
    (g_NM, sg), (x_KM, sx) = g, x
    N, K, bound = g_NM.shape[0], x_KM.shape[0], plan.groups.entries.shape[0]
    for name, q, s in (("dY^T", g_NM, sg), ("X^T", x_KM, sx)):
        if q.dtype != FP8 or q.shape[1] != bound * BLOCK or s.shape != (bound, q.shape[0]) or not s.is_contiguous():
            raise ValueError(f"{name}: expected {bound} groups of this plan, found {list(q.shape)} with {list(s.shape)}")
    check_device(g_NM, sg, x_KM, sx, plan.order)
    dw = torch.empty(plan.experts, N, K, dtype=out_dtype, device=g_NM.device)
    if bound == 0:
        return dw.zero_()
    grid = programs(g_NM.device, plan.experts * -(-N // SIDE) * -(-K // SIDE), 1)
    grouped_wgrad_kernel[grid](
        descriptor(g_NM, SIDE), descriptor(x_KM, SIDE), sg, sx, dw, plan.groups.first, plan.experts, N, K, grid[0],
        SIDE=SIDE, STAGES=STAGES, HEIGHT=HEIGHT, num_warps=WGRAD_WARPS, num_stages=STAGES, **PINNED,
    )  # fmt: skip
    return dw


def _specs() -> tuple[Spec, ...]:
    found = [
        Spec(
            f"grouped_wgrad_{out}", grouped_wgrad_kernel,
            {"g_NM": box(SIDE), "x_KM": box(SIDE), "sg": "*fp32", "sx": "*fp32", "dw": f"*{out}", "group_first": "*i32"}
            | dict.fromkeys(("E", "N", "K", "programs"), "i32"),
            {"SIDE": SIDE, "STAGES": STAGES, "HEIGHT": HEIGHT},
            {"num_warps": WGRAD_WARPS, "num_stages": STAGES, **PINNED}, ("N", "K"),
        )
        for out in ("bf16", "fp32")
    ]  # fmt: skip
    tables = dict.fromkeys(("order", "groups", "group_first"), "*i32")
    written = {"q": "*u8", "s": "*fp32"} | dict.fromkeys(("E", "W", "k", "x_r"), "i32")
    for scale in ("pow2", "fp32"):
        for tokens in (False, True):
            fixed = {"TOKENS": tokens, "COLUMNS": COLUMNS, "POW2": scale == "pow2", "HARDWARE": True}
            found += [
                Spec(
                    f"group_tokens{'_weighted' * tokens}_{scale}", group_tokens_kernel,
                    {"x": "*bf16", "weights": "*fp32", **tables, **written, "pitch": "i32"}, fixed,
                    {"num_warps": 4, **COMPILER}, ("W", "x_r", "pitch"),
                ),
                Spec(
                    f"regroup{'_tokens' * tokens}_{scale}", regroup_kernel,
                    {"x": "*u8", "sx": "*fp32", **tables, **written, **dict.fromkeys(("s_r", "s_g", "pitch"), "i32")}, fixed,
                    {"num_warps": 4, **COMPILER}, ("W", "x_r", "pitch"),
                ),
            ]  # fmt: skip
    return tuple(found)


KERNELS = _specs()
