"""The merged weight of ``fp8.lora``, W' = bf16(W + scaling * Σ_j B_j A_j), in one pass over W.

Every element is a sum of its own in the order of j, so the tiling affects no bit. Products of BF16 values are exact in FP32:
the fma rounds once, as the formula does. The last product and sum are two roundings, which is why fusion is off.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl_patch.fp8.formats import groups
from jetrl_patch.kernels.aot import Spec
from jetrl_patch.kernels.e4m3 import widened
from jetrl_patch.kernels.gemm_common import PINNED, check_device, rounded
from jetrl_patch.kernels.tiles import load_tile

#: rows of a tile of 128 columns, and its warps
ROWS, WARPS = 32, 4


@triton.jit
def merge_kernel(  # type: ignore[no-untyped-def]
    w, a, b, y, N, K, R, scaling, ROWS: tl.constexpr, HARDWARE: tl.constexpr
):
    """W and y are [N, K], A [R, K] and B transposed, [R, N]."""
    G = tl.cdiv(K, 128)
    n = (tl.program_id(0) // G) * ROWS + tl.arange(0, ROWS)
    k = (tl.program_id(0) % G) * 128 + tl.arange(0, 128)
    total = tl.zeros([ROWS, 128], tl.float32)
    for j in range(R):
        b_N = widened(tl.load(b + j * N + n, mask=n < N, other=0.0), HARDWARE)
        a_K = widened(tl.load(a + j * K + k, mask=k < K, other=0.0), HARDWARE)
        total = tl.fma(tl.broadcast_to(b_N[:, None], [ROWS, 128]), tl.broadcast_to(a_K[None, :], [ROWS, 128]), total)
    tile = load_tile(w, n, k, N, K, K, HARDWARE) + total * scaling
    tl.store(y + n.to(tl.int64)[:, None] * K + k[None, :], rounded(tile), mask=(n < N)[:, None] & (k < K)[None, :])


def merged_weight(w_NK: Tensor, a_RK: Tensor, b_NR: Tensor, scaling: float) -> Tensor:
    """``fp8.lora.merged_weight`` of BF16 tensors."""
    w, a, b = w_NK.contiguous(), a_RK.contiguous(), b_NR.t().contiguous()
    check_device(w, a, b)
    N, K = w.shape
    y = torch.empty(N, K, dtype=torch.bfloat16, device=w.device)
    merge_kernel[(-(-N // ROWS) * groups(K),)](
        w, a, b, y, N, K, a.shape[0], scaling, ROWS=ROWS, HARDWARE=not triton.knobs.runtime.interpret, num_warps=WARPS, **PINNED
    )
    return y


KERNELS = (
    Spec(
        "merge", merge_kernel, dict.fromkeys(("w", "a", "b", "y"), "*bf16")
        | dict.fromkeys(("N", "K", "R"), "i32") | {"scaling": "fp32"},
        {"ROWS": ROWS, "HARDWARE": True}, {"num_warps": WARPS, **PINNED}, ("N", "K"),
    ),
)  # fmt: skip
