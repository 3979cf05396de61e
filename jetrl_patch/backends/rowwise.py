"""Formats with one scale per output channel and per token: FP8 and INT8, for the rollout."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from jetrl_patch.backends.quantize import Quantized, scale_from_amax, to_fp8
from jetrl_patch.config.formats import ScaleFormat
from jetrl_patch.errors import ModelError, explain
from jetrl_patch.kernels.formats import AMAX_FLOOR

# ---- FP8 with one scale per output channel and per token, an alternative to 128-blocks -----------
# For a row x:  s = max(amax, 1e-10) / 448 in FP32 (rounded up to a power of two in scale format "pow2");
# q = RNE-saturate(x / s) to e4m3fn. The product is the block product with scales that are constant along K, so every
# backend computes it unchanged:  Y = round(Σ_kb fma(dot128(qX, qW), sX · sW, acc)).

def quantize_fp8_rows(x_MK: Tensor, scale_format: ScaleFormat) -> Quantized:
    """Quantize weights [N, K] or activations [M, K] to e4m3fn of the same shape and FP32 scales [rows, 1], "channels"."""
    x = x_MK.float()
    scale_M1 = scale_from_amax(x.abs().amax(-1, keepdim=True), scale_format)
    return Quantized(to_fp8(x / scale_M1), scale_M1, "channels", scale_format)


# ---- The reference INT8 quantizer. This code is the contract -------------------------------------
# Weights have one scale per output channel and activations one per token; with K last, both are one scale per row.
# For a row x:  amax = max |x|;  s = max(amax, 1e-10) / 127 in FP32;  q = clamp(RNE(x / s), -127, 127).
# Symmetric: there is no zero point, and -128 is unused. A NaN or Inf in a row makes its scale NaN or Inf and every
# result of the row NaN, so it stays visible.

INT8_MAX = 127


def quantize_int8_rows(x_MK: Tensor) -> Quantized:
    """Quantize weights [N, K] or activations [M, K] of any float dtype to int8 of the same shape and FP32 scales [rows, 1]."""
    x = x_MK.float()
    scale = x.abs().amax(-1, keepdim=True).clamp(min=AMAX_FLOOR)
    scale = scale / scale.new_full((), INT8_MAX)  # CUDA multiplies by the rounded reciprocal of a number
    # a non-finite value has no integer; the row's scale, also non-finite, keeps it visible
    steps = (x / scale).round().nan_to_num(0.0).clamp(-INT8_MAX, INT8_MAX)
    return Quantized(steps.to(torch.int8), scale, "channels", "fp32")


# ---- The INT8 product: an exact int32 sum, scaled, and rounded once to BF16 ----------------------
#     Y [M, N] = round(sX · (sW · FP32(Σ_k qX · qW)))
#
# The integer sum has no rounding, so its order does not matter: a row's result cannot depend on its neighbors, the kernel
# or the device. The order of the two scales is that of vLLM's CUTLASS epilogue.

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


def int8_fprop(x_MK: Tensor, w: Quantized, out_dtype: torch.dtype = torch.bfloat16, mm: IntMM = reference_mm) -> Tensor:
    """Y [M, N] of a BF16 activation, quantized per token: in BF16, or in FP32 the unrounded sum of a tensor-parallel rank."""
    x = quantize_int8_rows(x_MK)
    return (x.s * (w.s.t() * mm(x.q, w.q).float())).to(out_dtype)


def check_width(name: str, K: int) -> None:
    """Raise ModelError for a layer whose integer sum could overflow."""
    if K > MAX_K:
        required = f"an input width of at most {MAX_K}, so that its sum fits in int32"
        fix = f"keep it in BF16 with exclude=['{name.rsplit('.', 1)[-1]}'], or use precision='fp8-rollout'"
        raise ModelError(explain(f"INT8 layer {name}", required=required, found=f"width {K}", fix=fix))
