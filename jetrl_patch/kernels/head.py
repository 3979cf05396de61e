"""The products of ``lm_head``, and the gradient of log-probs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl_patch.kernels.common import widened
from jetrl_patch.kernels.gemm_common import PINNED, check_device, converted, new_output, place

# ---- Batch-invariant BF16 GEMM: Y [M, N] = X [M, K] W [N, K]^T, for ``lm_head`` and for linears that stay in BF16
# Sums are FP32, with K ascending in one program. All M and N use the same tile, so decode and training run the same instructions.

#: rows and columns of a tile, its step along K, warps, pipeline stages, and tiles per band (see ``place``)
ROWS, COLUMNS, STEP, WARPS, STAGES, HEIGHT = 128, 128, 64, 8, 3, 8


@triton.jit(do_not_specialize=["M"])  # one binary for every batch
def bf16_gemm_kernel(  # type: ignore[no-untyped-def]
    x, w, y, M, N, K, x_m, w_n,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr, HEIGHT: tl.constexpr,
):  # fmt: skip
    """Rows past M or N repeat the last row and are not stored. Columns past K read as 0."""
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
    for name, t in (("X", x_MK), ("W", w_NK)):
        if t.dtype != torch.bfloat16 or t.dim() != 2:
            raise TypeError(f"{name}: expected a torch.bfloat16 matrix, found {t.dtype} {list(t.shape)}")
    if x_MK.shape[1] != w_NK.shape[1]:
        raise ValueError(f"X {list(x_MK.shape)} and W {list(w_NK.shape)} differ in K")
    x_MK, w_NK = (t if t.stride(1) == 1 else t.contiguous() for t in (x_MK, w_NK))
    (M, K), N = x_MK.shape, w_NK.shape[0]
    y = new_output((M, N), out_dtype, x_MK, w_NK)
    if y.numel():
        bf16_gemm_kernel[(-(-M // ROWS) * -(-N // COLUMNS),)](
            x_MK, w_NK, y, M, N, K, x_MK.stride(0), w_NK.stride(0),
            ROWS=ROWS, COLUMNS=COLUMNS, STEP=STEP, STAGES=STAGES, HEIGHT=HEIGHT, num_warps=WARPS, num_stages=STAGES, **PINNED,
        )  # fmt: skip
    return y


# ---- The gradient of log-probs in one launch: reads the logits once and writes their gradient once, in their dtype
#     p = exp((x - top) / T + log p(top))      dx = ((token is the label) - p) * dy / T      top: the row's largest logit
#
# The forward pass keeps ``top`` and its log-prob, so no row is summed again. Relative to the largest logit, every exponent is at
# most 0, so every p that matters is computed from small numbers. In torch's operations, the same formula holds about four FP32
# copies of a block of logits.

#: columns and warps of a tile of one row
LOGPROB_COLUMNS, LOGPROB_WARPS = 2048, 4
#: dtypes of logits that the kernel reads and writes
DTYPES = (torch.bfloat16, torch.float32)


@triton.jit
def log_prob_backward_kernel(  # type: ignore[no-untyped-def]
    x, labels, dy, top, top_log_prob, temperature, dx, V, x_m, dx_m, t_m, COLUMNS: tl.constexpr, HARDWARE: tl.constexpr
):
    """x may be dx, because only one program reads what it writes."""
    tiles = tl.cdiv(V, COLUMNS)
    m = (tl.program_id(0) // tiles).to(tl.int64)
    v = (tl.program_id(0) % tiles) * COLUMNS + tl.arange(0, COLUMNS)
    by = tl.math.div_rn(1.0, tl.load(temperature + m * t_m))
    logits = widened(tl.load(x + m * x_m + v, mask=v < V, other=0.0), HARDWARE)
    p = tl.exp((logits - tl.load(top + m)) * by + tl.load(top_log_prob + m))
    gradient = (tl.where(v == tl.load(labels + m), 1.0, 0.0) - p) * (tl.load(dy + m) * by)
    tl.store(dx + m * dx_m + v, converted(gradient, dx), mask=v < V)


def log_prob_backward(
    x_MV: Tensor, labels_M: Tensor, dy_M: Tensor, top_M: Tensor, top_log_prob_M: Tensor, temperature: Tensor, dx_MV: Tensor
) -> None:
    """Write the gradient of ``log_softmax(x / temperature)[label]`` into ``dx_MV``, which may be ``x_MV`` itself.

    Args:
        x_MV, dx_MV: BF16 or FP32 with contiguous rows.
        labels_M: int64.
        dy_M, top_M, top_log_prob_M: FP32: the gradient of the log-probs, the largest logit of each row, and its log-prob.
        temperature: FP32, one element or one per row.
    """
    labels_M, dy_M, temperature = labels_M.contiguous(), dy_M.contiguous(), temperature.contiguous()
    check_device(x_MV, labels_M, dy_M, top_M, top_log_prob_M, temperature, dx_MV)
    M, V = x_MV.shape
    if x_MV.numel():
        log_prob_backward_kernel[(M * -(-V // LOGPROB_COLUMNS),)](
            x_MV, labels_M, dy_M, top_M, top_log_prob_M, temperature, dx_MV, V, x_MV.stride(0), dx_MV.stride(0),
            int(temperature.numel() > 1), COLUMNS=LOGPROB_COLUMNS, HARDWARE=not triton.knobs.runtime.interpret,
            num_warps=LOGPROB_WARPS, **PINNED,
        )  # fmt: skip
