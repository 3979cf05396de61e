"""RMSNorm of the sum of a layer's output and the residual, quantized for the FP8 linear that reads it: the rollout's one launch.

    total = bf16(x + residual);   y = bf16(w * bf16(total / rms(total)));   q, s = quantize_rows(y)

The rows are bit-equal to ``norm.rms_norm`` and ``quantize_rows``. Nothing in them depends on an order but the sum of squares,
whose order follows from how the compiler spreads a tile over threads: accesses of 16 bytes in tiles of one shape are spread
alike, 8 elements of BF16 in ``norm``, but 16 where the same tile also stores bytes. So the row is read twice, the second time
from the cache and as a tile of another shape: the sum is spread as in ``norm`` (a test compares the compiled kernels).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl_patch.errors import explain
from jetrl_patch.fp8.formats import ScaleFormat, groups
from jetrl_patch.kernels.aot import Spec
from jetrl_patch.kernels.e4m3 import bf16_value, magnitude, quantized, widened
from jetrl_patch.kernels.gemm_common import check_device, rounded
from jetrl_patch.kernels.outputs import COMPILER, as_fp8, check_input, new_rows, options
from jetrl_patch.kernels.producers import check_width, reciprocal_rms, warps_for


@triton.jit(do_not_specialize=["s_g"])  # one binary for every batch
def norm_rows_kernel(  # type: ignore[no-untyped-def]
    x, residual, w, q, s, total, K, x_m, r_m, s_m, s_g,
    EPS: tl.constexpr, GROUPS: tl.constexpr, ADD: tl.constexpr, POW2: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """One row per program; GROUPS is a power of two that covers the row. Without ADD there is no residual, and no total."""
    m = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, GROUPS)[:, None] * 128 + tl.arange(0, 128)[None, :]
    value = widened(tl.load(x + m * x_m + k, mask=k < K, other=0.0), HARDWARE)
    source = x + m * x_m
    if ADD:
        value = bf16_value(value + widened(tl.load(residual + m * r_m + k, mask=k < K, other=0.0), HARDWARE), HARDWARE)
        source = total + m * K
        tl.store(source + k, rounded(value), mask=k < K)
    root = reciprocal_rms(value, K, EPS)
    tl.debug_barrier()  # other threads read the total below
    g = tl.arange(0, GROUPS)[:, None, None]
    k = g * 128 + tl.arange(0, 128)[None, None, :]
    again = widened(tl.load(source + k, mask=k < K, other=0.0), HARDWARE)
    weight = widened(tl.load(w + k, mask=k < K, other=0.0), HARDWARE)
    tile = bf16_value(weight * bf16_value(again * root, HARDWARE), HARDWARE)
    codes, scale = quantized(tile, tl.max(magnitude(tile), 2, keep_dims=True), POW2, HARDWARE)
    tl.store(q + m * K + k, codes, mask=k < K)
    tl.store(s + m * s_m + g * s_g, scale, mask=g * 128 < K)


class NormedRows(NamedTuple):
    """e4m3 [M, K], FP32 scales [M, G], and the BF16 sum [M, K], which is None without a residual."""

    q_MK: Tensor
    s_MG: Tensor
    total_MK: Tensor | None


def norm_quantize_rows(
    x_MK: Tensor, residual_MK: Tensor | None, weight_K: Tensor, eps: float, scale_format: ScaleFormat, columns: bool = False
) -> NormedRows:
    """``quantize_rows(rms_norm(x + residual, weight, eps))``, and the sum.

    Args:
        x_MK, residual_MK: BF16 with contiguous rows of at most 16384 elements; the row stride is free.
        weight_K: BF16 [K], contiguous.
        columns: as for ``quantize_rows``.

    Raises:
        TypeError, ValueError, ConfigError: as ``outputs.check_input``.
    """
    check_input("x", x_MK)
    M, K = x_MK.shape
    check_width(K)
    if residual_MK is not None:
        check_input("residual", residual_MK)
        check_device(x_MK, residual_MK)
    shapes = [weight_K.shape, *([] if residual_MK is None else [residual_MK.shape])]
    if shapes != [(K,), (M, K)][: len(shapes)] or weight_K.dtype != torch.bfloat16 or weight_K.stride(0) != 1:
        what, required = "RMSNorm of x and a residual", f"a contiguous torch.bfloat16 weight [{K}] and a residual [{M}, {K}]"
        found = f"{weight_K.dtype} and {' and '.join(str(list(shape)) for shape in shapes)}"
        raise ValueError(explain(what, required=required, found=found, fix="pass both in the shape of x"))
    check_device(x_MK, weight_K)
    fixed, (q, s) = options(x_MK, scale_format), new_rows(x_MK, M, K, columns)
    add = residual_MK is not None
    total = torch.empty_like(x_MK, memory_format=torch.contiguous_format) if add else None
    if q.numel():
        covering, other = triton.next_power_of_2(groups(K)), x_MK if residual_MK is None else residual_MK
        norm_rows_kernel[(M,)](
            x_MK, other, weight_K, q, s, x_MK if total is None else total, K, x_MK.stride(0), other.stride(0), *s.stride(),
            EPS=float(eps), GROUPS=covering, ADD=add, num_warps=warps_for(covering), **fixed,
        )  # fmt: skip
    return NormedRows(as_fp8(q), s, total)


KERNELS = tuple(
    Spec(
        f"norm_rows{covering * 128}{'_added' * add}_{scale}", norm_rows_kernel,
        dict.fromkeys(("x", "residual", "w"), "*bf16") | {"q": "*u8", "s": "*fp32", "total": "*bf16"}
        | dict.fromkeys(("K", "x_m", "r_m", "s_m", "s_g"), "i32"),
        {"EPS": 1e-6, "GROUPS": covering, "ADD": add, "POW2": scale == "pow2", "HARDWARE": True},
        {"num_warps": warps_for(covering), **COMPILER}, ("K", "x_m", "r_m"),
    )
    for scale in ("pow2", "fp32")
    for add in (False, True)
    for covering in (8, 32, 64, 128)
)  # fmt: skip
