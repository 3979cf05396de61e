"""The gradient of a token's log-prob, one launch: the logits are read once, their gradient is written once, in their dtype.

    p = exp((x - top) / T + log p(top))      dx = ((token is the label) - p) * dy / T      top: the row's largest logit

The forward pass keeps ``top`` and its log-prob, so that no row is summed again. Relative to the largest, every exponent is at
most 0 and a p that matters is computed from small numbers. In torch's operations a block of the same formula holds about four
copies of the logits in FP32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl_patch.kernels.aot import Spec
from jetrl_patch.kernels.e4m3 import widened
from jetrl_patch.kernels.gemm_common import PINNED, check_device, converted

#: columns and warps of a tile, which has one row
COLUMNS, WARPS = 2048, 4
#: dtypes of logits that the kernel reads and writes
DTYPES = (torch.bfloat16, torch.float32)


@triton.jit
def log_prob_backward_kernel(  # type: ignore[no-untyped-def]
    x, labels, dy, top, top_log_prob, temperature, dx, V, x_m, dx_m, t_m, COLUMNS: tl.constexpr, HARDWARE: tl.constexpr
):
    """x may be dx: a program writes what it alone has read."""
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
        dy_M: the gradient of the log-probs. top_M: the largest logit of each row. top_log_prob_M: its log-prob. All FP32.
        temperature: FP32, of one element or one per row.
    """
    labels_M, dy_M, temperature = labels_M.contiguous(), dy_M.contiguous(), temperature.contiguous()
    check_device(x_MV, labels_M, dy_M, top_M, top_log_prob_M, temperature, dx_MV)
    M, V = x_MV.shape
    if x_MV.numel():
        log_prob_backward_kernel[(M * -(-V // COLUMNS),)](
            x_MV, labels_M, dy_M, top_M, top_log_prob_M, temperature, dx_MV, V, x_MV.stride(0), dx_MV.stride(0),
            int(temperature.numel() > 1), COLUMNS=COLUMNS, HARDWARE=not triton.knobs.runtime.interpret,
            num_warps=WARPS, **PINNED,
        )  # fmt: skip


KERNELS = tuple(
    Spec(
        f"log_prob_backward_{name}", log_prob_backward_kernel,
        {"x": f"*{name}", "labels": "*i64", **dict.fromkeys(("dy", "top", "top_log_prob", "temperature"), "*fp32"),
         "dx": f"*{name}", **dict.fromkeys(("V", "x_m", "dx_m", "t_m"), "i32")},
        {"COLUMNS": COLUMNS, "HARDWARE": True}, {"num_warps": WARPS, **PINNED}, ("V", "x_m", "dx_m"),
    )
    for name in ("bf16", "fp32")
)  # fmt: skip
