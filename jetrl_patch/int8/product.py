"""The INT8 product: exact in int32, then scaled, then rounded once to BF16.

    Y [M, N] = round(sX · (sW · FP32(Σ_k qX · qW)))

The integer sum has no rounding and so no order: a row's result cannot depend on its neighbours, on the kernel or on
the device. The order of the two scales is that of vLLM's CUTLASS epilogue.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from jetrl_patch.errors import ModelError
from jetrl_patch.int8.quantize import INT8_MAX, quantize_rows

__all__ = ["MAX_K", "check_width", "choose", "fprop", "int_mm", "product", "reference_mm"]

#: the widest layer whose integer sum fits into int32 whatever its values are
MAX_K = (2**31 - 1) // INT8_MAX**2

#: int8 [M, K], int8 [N, K] -> int32 [M, N]
IntMM = Callable[[Tensor, Tensor], Tensor]


def reference_mm(q_MK: Tensor, w_NK: Tensor) -> Tensor:
    """The sum in FP64, which holds every integer up to 2**53."""
    return (q_MK.double() @ w_NK.double().t()).to(torch.int32)


def int_mm(q_MK: Tensor, w_NK: Tensor) -> Tensor:
    """torch's integer product: VNNI and AMX on a CPU, cuBLASLt on CUDA (which wants multiples of 8 and M > 16).

    On CUDA the widths are padded with zeros, which add nothing. That branch was not run on a GPU yet.
    """
    (M, K), N = q_MK.shape, w_NK.shape[0]
    if M == 0 or K == 1:  # torch 2.13 on a CPU gives other numbers for K = 1
        return reference_mm(q_MK, w_NK)
    if q_MK.device.type == "cuda":
        k = -K % 8
        q_MK, w_NK = F.pad(q_MK, (0, k, 0, max(0, 32 - M))), F.pad(w_NK, (0, k, 0, -N % 8))
    return torch._int_mm(q_MK, w_NK.t())[:M, :N]


def choose(name: str, device_type: str) -> IntMM:
    """``int_mm`` where it is right on this machine, else the reference; "torch" asks for the reference."""
    if name == "torch" or (device_type == "cpu" and not _is_right_here()):
        return reference_mm
    return int_mm


@functools.lru_cache(maxsize=1)
def _is_right_here() -> bool:
    """On CPUs without VNNI an int8 kernel may add pairs of products in saturating int16: the extremes show it."""
    signs = torch.tensor([1, 1, -1, 1, -1, -1, 1, 1], dtype=torch.int8).repeat(64)
    x = (signs * INT8_MAX).repeat(16, 1)
    x[::2] = INT8_MAX
    return torch.equal(int_mm(x, x), reference_mm(x, x))


def product(
    q_MK: Tensor, s_M1: Tensor, w_NK: Tensor, s_N1: Tensor, out_dtype: torch.dtype, mm: IntMM = reference_mm
) -> Tensor:
    """[M, N] in BF16, or in FP32 as the unrounded partial sum of a tensor-parallel rank."""
    return (s_M1 * (s_N1.t() * mm(q_MK, w_NK).float())).to(out_dtype)


def fprop(
    x_MK: Tensor, w_NK: Tensor, s_N1: Tensor, out_dtype: torch.dtype = torch.bfloat16, mm: IntMM = reference_mm
) -> Tensor:
    """Quantize a BF16 activation per token and multiply: what a rollout's linear layer does."""
    return product(*quantize_rows(x_MK), w_NK, s_N1, out_dtype, mm)


def check_width(name: str, K: int) -> None:
    """Raise ModelError for a layer whose integer sum might overflow."""
    if K > MAX_K:
        raise ModelError(
            f"{name} is {K} wide, and an INT8 sum over more than {MAX_K} does not fit into int32; leave it in BF16 by "
            f"exclude=['{name.rsplit('.', 1)[-1]}'], or use precision='fp8-rollout'"
        )
