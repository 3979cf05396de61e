"""``fp8.ranks.added`` in one launch: the FP32 sums of R ranks, added in rank order and rounded once to BF16.

Elements are independent, so neither tile nor batch affects a bit. torch's operators take R launches and move 12 (R - 1) + 6
bytes an element instead of 4 R + 2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl_patch.kernels.aot import Spec
from jetrl_patch.kernels.gemm_common import PINNED, check_device, rounded

#: elements and warps of a program
SIZE, WARPS = 1024, 4


@triton.jit(do_not_specialize=["M"])  # one binary for every batch
def rank_sum_kernel(parts, y, M, N, RANKS: tl.constexpr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    size = M.to(tl.int64) * N
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    total = tl.load(parts + at, mask=at < size, other=0.0)
    for rank in tl.static_range(1, RANKS):
        total += tl.load(parts + rank * size + at, mask=at < size, other=0.0)
    tl.store(y + at, rounded(total), mask=at < size)


def rank_sum(parts_RMN: Tensor) -> Tensor:
    """BF16 [M, N] from FP32 [R, M, N].

    Raises:
        TypeError: the parts are not FP32.
        ValueError, ConfigError: as ``check_device``.
    """
    if parts_RMN.dtype != torch.float32:
        raise TypeError(f"the sums of ranks must be torch.float32, found {parts_RMN.dtype}")
    check_device(parts_RMN)
    (R, M, N), parts = parts_RMN.shape, parts_RMN.contiguous()
    y = torch.empty(M, N, dtype=torch.bfloat16, device=parts.device)
    if y.numel():
        rank_sum_kernel[(-(-M * N // SIZE),)](parts, y, M, N, RANKS=R, SIZE=SIZE, num_warps=WARPS, **PINNED)
    return y


KERNELS = tuple(
    Spec(
        f"rank_sum{ranks}", rank_sum_kernel, {"parts": "*fp32", "y": "*bf16", "M": "i32", "N": "i32"},
        {"RANKS": ranks, "SIZE": SIZE}, {"num_warps": WARPS, **PINNED}, ("N",),
    )
    for ranks in (2, 8)
)  # fmt: skip
