"""Requantize a saved FP8 activation in groups of 128 tokens, which makes WGrad's operand from bytes alone.

X e4m3 [M, K] with s [M, G] in 1x128 groups -> X^T e4m3 [K, M] with s [ceil(M / 128), K]. As in ``NativeBackend.wgrad``,
q * s is rounded to BF16 (exact with power-of-two scales) and quantized again. The BF16 values never reach memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl_patch.errors import explain
from jetrl_patch.fp8.formats import FP8, ScaleFormat, groups
from jetrl_patch.kernels.aot import Spec
from jetrl_patch.kernels.e4m3 import bf16_value, decode
from jetrl_patch.kernels.outputs import COMPILER, as_fp8, check_input, new_tokens, options
from jetrl_patch.kernels.tiles import store_tokens

#: columns per tile of 128 tokens: a divisor of 128, so that each row of a tile has one scale
COLUMNS = 64


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
    store_tokens(tile, qt, st, g, k, M, K, pitch, True, POW2, HARDWARE)


def requantize_tokens(
    q_MK: Tensor, s_MG: Tensor, scale_format: ScaleFormat, pad: bool = False
) -> tuple[Tensor, Tensor]:
    """e4m3 [K, M] and FP32 [ceil(M / 128), K] from e4m3 [M, K] and FP32 [M, G]; the scales may have any strides.

    Args:
        q_MK: contiguous rows; the row stride is free.
        pad: write [K, ceil(M / 128) * 128]; tokens past M count as zero.

    Raises:
        TypeError, ValueError, ConfigError: as ``outputs.check_input``.
    """
    check_input("activation", q_MK, FP8)
    fixed, (M, K) = options(q_MK, scale_format), q_MK.shape
    if s_MG.shape != (M, groups(K)) or s_MG.dtype != torch.float32 or s_MG.device != q_MK.device:
        raise ValueError(
            explain(
                "the activation's scales",
                required=f"torch.float32 [{M}, {groups(K)}] on {q_MK.device}",
                found=f"{s_MG.dtype} {list(s_MG.shape)} on {s_MG.device}",
                fix="pass the pair that the quantizer returned",
            )
        )
    qt, st = new_tokens(q_MK, M, K, True, pad)
    if qt.numel():
        grid = (groups(M) * -(-K // COLUMNS),)
        requantize_kernel[grid](
            q_MK.view(torch.uint8), s_MG, qt, st, M, K, q_MK.stride(0), *s_MG.stride(), qt.stride(0),
            COLUMNS=COLUMNS, num_warps=4, **fixed,
        )  # fmt: skip
    return as_fp8(qt), st


KERNELS = tuple(
    Spec(
        f"requantize_tokens_{scale}", requantize_kernel,
        {"q": "*u8", "s": "*fp32", "qt": "*u8", "st": "*fp32"} | dict.fromkeys(("M", "K", "q_m", "s_m", "s_g", "pitch"), "i32"),
        {"COLUMNS": COLUMNS, "POW2": scale == "pow2", "HARDWARE": True}, {"num_warps": 4, **COMPILER},
        ("K", "q_m", "pitch"),
    )
    for scale in ("pow2", "fp32")
)  # fmt: skip
