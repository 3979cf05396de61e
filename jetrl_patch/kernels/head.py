"""Batch-invariant BF16 GEMM: Y [M, N] = X [M, K] W [N, K]^T, for ``lm_head`` and for linears that stay in BF16.

Sums are FP32, with K ascending in one program. All M and N use the same tile, so decode and training run the same
instructions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl_patch.kernels.aot import Spec
from jetrl_patch.kernels.gemm_common import PINNED, check_device, check_output, converted, place

#: a tile of Y, the step along K, warps, the depth of the pipeline, and tiles of a band (see ``place``)
ROWS, COLUMNS, STEP, WARPS, STAGES, HEIGHT = 128, 128, 64, 8, 3, 8


@triton.jit(do_not_specialize=["M"])  # one binary for every batch
def bf16_gemm_kernel(  # type: ignore[no-untyped-def]
    x, w, y, M, N, K, x_m, w_n,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr, HEIGHT: tl.constexpr,
):  # fmt: skip
    """Rows past M or N read as the last row and are not stored; columns past K read as 0."""
    row, column = place(tl.program_id(0), tl.cdiv(M, ROWS), tl.cdiv(N, COLUMNS), HEIGHT)
    m = row * ROWS + tl.arange(0, ROWS)
    n = column * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, STEP)
    x_at = x + tl.minimum(m, M - 1).to(tl.int64)[:, None] * x_m + k[None, :]
    w_at = w + tl.minimum(n, N - 1).to(tl.int64)[:, None] * w_n + k[None, :]
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for kb in tl.range(0, tl.cdiv(K, STEP), num_stages=STAGES):
        there = (kb * STEP + k < K)[None, :]
        x_tile = tl.load(x_at + kb * STEP, mask=there, other=0.0)
        w_tile = tl.load(w_at + kb * STEP, mask=there, other=0.0)
        acc = tl.dot(x_tile, tl.trans(w_tile), acc)
    at = y + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(at, converted(acc, y), mask=(m < M)[:, None] & (n < N)[None, :])


def bf16_gemm(x_MK: Tensor, w_NK: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Y [M, N] in FP32, or rounded once to BF16. Operands are BF16 with any row stride."""
    check_output(out_dtype)
    for name, t in (("X", x_MK), ("W", w_NK)):
        if t.dtype != torch.bfloat16 or t.dim() != 2:
            raise TypeError(f"{name}: expected a torch.bfloat16 matrix, found {t.dtype} {list(t.shape)}")
    if x_MK.shape[1] != w_NK.shape[1]:
        raise ValueError(f"X {list(x_MK.shape)} and W {list(w_NK.shape)} differ in K")
    check_device(x_MK, w_NK)
    x_MK, w_NK = (t if t.stride(1) == 1 else t.contiguous() for t in (x_MK, w_NK))
    (M, K), N = x_MK.shape, w_NK.shape[0]
    y = torch.empty(M, N, dtype=out_dtype, device=x_MK.device)
    if y.numel():
        bf16_gemm_kernel[(-(-M // ROWS) * -(-N // COLUMNS),)](
            x_MK, w_NK, y, M, N, K, x_MK.stride(0), w_NK.stride(0),
            ROWS=ROWS, COLUMNS=COLUMNS, STEP=STEP, STAGES=STAGES, HEIGHT=HEIGHT, num_warps=WARPS, num_stages=STAGES, **PINNED,
        )  # fmt: skip
    return y


KERNELS = tuple(
    Spec(
        f"bf16_gemm_{out}", bf16_gemm_kernel,
        {"x": "*bf16", "w": "*bf16", "y": f"*{out}"} | dict.fromkeys(("M", "N", "K", "x_m", "w_n"), "i32"),
        {"ROWS": ROWS, "COLUMNS": COLUMNS, "STEP": STEP, "STAGES": STAGES, "HEIGHT": HEIGHT},
        {"num_warps": WARPS, "num_stages": STAGES, **PINNED}, ("N", "K", "x_m", "w_n"),
    )
    for out in ("bf16", "fp32")
)  # fmt: skip
