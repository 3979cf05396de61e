"""A test double of ``torch.nn.functional.scaled_mm`` with block scales, with what torch and cuBLASLt refuse on sm_90.

Written after

- torch 2.11 to 2.13, ``aten/src/ATen/native/cuda/ScaledBlas.cpp``: ``_scaled_mm_cuda_v2_out``, ``_scaled_block1x128_block1x128``
  and ``_scaled_block1x128_block128x128``. K need not be a multiple of 128: every count of groups is rounded up. torch's Python
  formula for tensors without memory (``torch._meta_registrations``) rounds down and so refuses more; an eager product does not
  call it.
- NVIDIA's documentation of cuBLAS, "128-element 1D and 128x128 2D block scaling for FP8 data types": scales start at multiples of
  16 bytes, M and N are multiples of 4, results are FP16, BF16 or FP32.
- TransformerEngine's ``cublaslt_gemm.cu``, which found that rows with 1x128 scales must be multiples of 8.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from jetrl_patch.backends import quantize
from jetrl_patch.kernels.formats import FP8, groups

ROWS, BLOCKS = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128


class Refused(RuntimeError):
    """An assertion of torch, or a shape for which cuBLASLt has no algorithm."""


def need(ok: bool, what: str) -> None:
    if not ok:
        raise Refused(what)


def check(a: Tensor, b: Tensor, sa: Tensor, recipe_a: object, sb: Tensor, recipe_b: object, output_dtype: torch.dtype) -> None:
    """Raise what the library would, for a [M, K] and b [K, N]."""
    (M, K), N = a.shape, b.shape[1]
    need(a.dtype == b.dtype == FP8 and b.shape[0] == K, "e4m3 [M, K] and [K, N]")
    need(len({t.device for t in (a, b, sa, sb)}) == 1, "tensors on one device")
    need(a.stride(1) == 1 and a.stride(0) >= K, "a row-major")
    need(b.stride(0) == 1 and b.stride(1) >= K, "b column-major")
    need(K % 16 == N % 16 == 0, "the trailing dimensions divisible by 16")
    need(M % 8 == 0, "M % 8")
    need(a.data_ptr() % 16 == b.data_ptr() % 16 == a.stride(0) % 16 == b.stride(1) % 16 == 0, "operands aligned to 16 bytes")
    need(output_dtype in (torch.float16, torch.bfloat16, torch.float32), "an output dtype")
    need(recipe_a is ROWS and recipe_b in (ROWS, BLOCKS), "1x128 scales for a, 1x128 or 128x128 for b")
    G = groups(K)
    _scales(sa, M, G, alone=sb if recipe_b is ROWS else sa)
    if recipe_b is ROWS:
        _scales(sb, N, G, alone=sb)
    else:
        _scales(sb, -(-G // 4) * 4, groups(N), alone=sb)


def _scales(s: Tensor, rows: int, columns: int, alone: Tensor) -> None:
    """FP32 [rows, columns], adjacent rows. Some releases accept a's one column of 1x128 scales by b's stride (``alone``)."""
    need(s.dtype == torch.float32 and s.shape == (rows, columns), f"scales FP32 [{rows}, {columns}], found {list(s.shape)}")
    one = columns == 1 and s.stride(1) == alone.stride(1) == 1
    need(s.stride(0) == 1 and (s.stride(1) == rows or one), f"scales with strides (1, {rows}), found {s.stride()}")
    need(s.data_ptr() % 16 == 0, "scales that start at a multiple of 16 bytes")


def scaled_mm(
    a: Tensor, b: Tensor, sa: Tensor, recipe_a: object, sb: Tensor, recipe_b: object, output_dtype: torch.dtype
) -> Tensor:
    """The product by the oracle."""
    check(a, b, sa, recipe_a, sb, recipe_b, output_dtype)
    rows = sb if recipe_b is ROWS else quantize.expand_weight_scale(sb[: groups(a.shape[1])].t(), b.shape[1])
    return quantize.fprop(a.contiguous(), sa.contiguous(), b.t().contiguous(), rows.contiguous(), output_dtype)
