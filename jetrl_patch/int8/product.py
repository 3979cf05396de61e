"""The INT8 product: an exact int32 sum, scaled, and rounded once to BF16.

    Y [M, N] = round(sX · (sW · FP32(Σ_k qX · qW)))

The integer sum has no rounding, so its order does not matter: a row's result cannot depend on its neighbours, the kernel
or the device. The order of the two scales is that of vLLM's CUTLASS epilogue.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from jetrl_patch.errors import ModelError, explain
from jetrl_patch.int8.quantize import INT8_MAX, quantize_rows

__all__ = ["MAX_K", "check_width", "choose", "fprop", "int_mm", "product", "reference_mm"]

#: the largest K whose integer sum fits in int32 for all values
MAX_K = (2**31 - 1) // INT8_MAX**2

#: int8 [M, K], int8 [N, K] -> int32 [M, N]
IntMM = Callable[[Tensor, Tensor], Tensor]


def reference_mm(q_MK: Tensor, w_NK: Tensor) -> Tensor:
    """The integer product computed in FP64, which represents every integer up to 2**53."""
    return (q_MK.double() @ w_NK.double().t()).to(torch.int32)


def int_mm(q_MK: Tensor, w_NK: Tensor) -> Tensor:
    """torch's integer product: VNNI and AMX on a CPU, cuBLASLt on CUDA (which needs multiples of 8 and M > 16).

    On CUDA, operands are padded with zeros, which do not change the sum. That branch has not yet run on a GPU.
    """
    (M, K), N = q_MK.shape, w_NK.shape[0]
    if M == 0 or K == 1:  # torch 2.13 on a CPU returns wrong results for K = 1
        return reference_mm(q_MK, w_NK)
    if q_MK.device.type == "cuda":
        k = -K % 8
        q_MK, w_NK = F.pad(q_MK, (0, k, 0, max(0, 32 - M))), F.pad(w_NK, (0, k, 0, -N % 8))
    return torch._int_mm(q_MK, w_NK.t())[:M, :N]


def choose(name: str, device_type: str) -> IntMM:
    """``int_mm`` if it is correct on this machine, otherwise the reference. ``name="torch"`` selects the reference."""
    if name == "torch" or (device_type == "cpu" and not _is_right_here()):
        return reference_mm
    return int_mm


@functools.lru_cache(maxsize=1)
def _is_right_here() -> bool:
    """Test extreme values: without VNNI, a CPU's int8 kernel may add pairs of products in saturating int16."""
    signs = torch.tensor([1, 1, -1, 1, -1, -1, 1, 1], dtype=torch.int8).repeat(64)
    x = (signs * INT8_MAX).repeat(16, 1)
    x[::2] = INT8_MAX
    return torch.equal(int_mm(x, x), reference_mm(x, x))


def product(
    q_MK: Tensor, s_M1: Tensor, w_NK: Tensor, s_N1: Tensor, out_dtype: torch.dtype, mm: IntMM = reference_mm
) -> Tensor:
    """Multiply quantized operands. Returns [M, N] in BF16, or in FP32 the unrounded partial sum of a tensor-parallel rank."""
    return (s_M1 * (s_N1.t() * mm(q_MK, w_NK).float())).to(out_dtype)


def fprop(
    x_MK: Tensor, w_NK: Tensor, s_N1: Tensor, out_dtype: torch.dtype = torch.bfloat16, mm: IntMM = reference_mm
) -> Tensor:
    """Quantize a BF16 activation per token and multiply, as a rollout's linear layer does."""
    return product(*quantize_rows(x_MK), w_NK, s_N1, out_dtype, mm)


def check_width(name: str, K: int) -> None:
    """Raise ModelError for a layer whose integer sum could overflow."""
    if K > MAX_K:
        raise ModelError(
            explain(
                f"INT8 layer {name}",
                required=f"an input width of at most {MAX_K}, so that its sum fits in int32",
                found=f"width {K}",
                fix=f"keep it in BF16 with exclude=['{name.rsplit('.', 1)[-1]}'], or use precision='fp8-rollout'",
            )
        )
