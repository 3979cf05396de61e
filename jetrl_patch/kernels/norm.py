"""RMSNorm in the rounding order of Hugging Face models, one row per program: y = bf16(w * bf16(x / rms(x))).

A program holds its whole row, so the order of the sum depends on the width alone. Squares of BF16 values are exact, and their
sum and root are FP64. The values equal those of the fused producers, which also quantize them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl_patch.errors import ModelError, explain
from jetrl_patch.fp8.formats import groups
from jetrl_patch.kernels.aot import Spec
from jetrl_patch.kernels.e4m3 import bf16_value, widened
from jetrl_patch.kernels.gemm_common import PINNED, check_device, rounded
from jetrl_patch.kernels.producers import WIDEST, reciprocal_rms, warps_for


@triton.jit
def rms_norm_kernel(  # type: ignore[no-untyped-def]
    x, w, y, rstd, K, x_m, EPS: tl.constexpr, GROUPS: tl.constexpr, HARDWARE: tl.constexpr
):
    """GROUPS is a power of two; GROUPS * 128 is at least K."""
    m = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, GROUPS)[:, None] * 128 + tl.arange(0, 128)[None, :]
    value = widened(tl.load(x + m * x_m + k, mask=k < K, other=0.0), HARDWARE)
    root = reciprocal_rms(value, K, EPS)
    weight = widened(tl.load(w + k, mask=k < K, other=0.0), HARDWARE)
    tl.store(y + m * K + k, rounded(weight * bf16_value(value * root, HARDWARE)), mask=k < K)
    tl.store(rstd + m, root)


def rms_norm(x_MK: Tensor, weight_K: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return y BF16 [M, K] and 1/rms FP32 [M]. Inputs are BF16; x may have any row stride.

    Raises:
        ModelError: a row is wider than one program can hold.
    """
    M, K = x_MK.shape
    if K > WIDEST:
        raise ModelError(
            explain("align='exact' on CUDA", required=f"RMSNorm up to width {WIDEST}", found=K, fix="use align='linear'")
        )
    x_MK = x_MK if x_MK.stride(1) == 1 else x_MK.contiguous()
    check_device(x_MK, weight_K)
    y = torch.empty(M, K, dtype=torch.bfloat16, device=x_MK.device)
    rstd = torch.empty(M, dtype=torch.float32, device=x_MK.device)
    if M:
        covering = triton.next_power_of_2(groups(K))
        rms_norm_kernel[(M,)](
            x_MK, weight_K.contiguous(), y, rstd, K, x_MK.stride(0), EPS=float(eps), GROUPS=covering,
            HARDWARE=not triton.knobs.runtime.interpret, num_warps=warps_for(covering), **PINNED,
        )  # fmt: skip
    return y, rstd


KERNELS = tuple(
    Spec(
        f"rms_norm{covering * 128}", rms_norm_kernel,
        {"x": "*bf16", "w": "*bf16", "y": "*bf16", "rstd": "*fp32", "K": "i32", "x_m": "i32"},
        {"EPS": 1e-6, "GROUPS": covering, "HARDWARE": True}, {"num_warps": warps_for(covering), **PINNED}, ("K", "x_m"),
    )
    for covering in (1, 8, 32, 64, 128)
)  # fmt: skip
