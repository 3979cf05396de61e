"""Triton kernel of ``exact.kv_cache``: quantize keys and values per token and head, into a paged cache or back to BF16.

A program handles one head of one token, of the keys or of the values. Its bits depend on nothing else.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl_patch.errors import explain
from jetrl_patch.kernels.attention import check_head_dim, narrowed
from jetrl_patch.kernels.common import COMPILER, decode, magnitude, quantized, widened
from jetrl_patch.kernels.gemm_common import check_device

WARPS = 1


@triton.jit
def store_head(  # type: ignore[no-untyped-def]
    x, q, s, slots, x_t, q_b, s_b, KH: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, HARDWARE: tl.constexpr
):
    """Quantize one head of a token. With SIZE, into the block and row of its slot; without, back to BF16 [T, KH, D] in q."""
    token, kh, d = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, D)
    row = widened(tl.load(x + token * x_t + kh * D + d), HARDWARE)
    codes, scale = quantized(row, tl.max(magnitude(row), 0), True, HARDWARE)
    if SIZE == 0:
        tl.store(q + (token * KH + kh) * D + d, narrowed(decode(codes, HARDWARE) * scale, HARDWARE))
    else:
        slot = tl.load(slots + token)
        if slot >= 0:
            block, place = slot // SIZE, (slot % SIZE) * KH + kh
            tl.store(q + block * q_b + place * D + d, codes)
            tl.store(s + block * s_b + place, scale)


@triton.jit
def store_kernel(  # type: ignore[no-untyped-def]
    k, v, qk, qv, sk, sv, slots, k_t, v_t, q_b, s_b,
    KH: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """The keys on programs 0 of axis 2, the values on programs 1."""
    if tl.program_id(2) == 0:
        store_head(k, qk, sk, slots, k_t, q_b, s_b, KH, D, SIZE, HARDWARE)
    else:
        store_head(v, qv, sv, slots, v_t, q_b, s_b, KH, D, SIZE, HARDWARE)


def rounded(k_TKD: Tensor, v_TKD: Tensor) -> tuple[Tensor, Tensor]:
    """As ``exact.kv_cache.rounded``."""
    k, v = (torch.empty(x.shape, dtype=torch.bfloat16, device=x.device) for x in (k_TKD, v_TKD))
    _launch(k_TKD, v_TKD, (k, v, k, v, k), (0, 0), 0)  # without a cache, scales and slots are not used
    return k, v


def store(k_TKD: Tensor, v_TKD: Tensor, slots: Tensor, cache: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    """As ``exact.kv_cache.Pages.store``."""
    strides = (cache[0].stride(0), cache[2].stride(0))
    _launch(k_TKD, v_TKD, (*cache, slots), strides, cache[0].shape[1])


def _launch(k: Tensor, v: Tensor, into: tuple[Tensor, ...], strides: tuple[int, int], size: int) -> None:
    T, KH, D = k.shape
    check_head_dim(D)
    for name, x in (("k", k), ("v", v)):
        if x.dtype != torch.bfloat16 or x.shape != k.shape or x.stride()[1:] != (D, 1):
            required, found = f"BF16 {[T, KH, D]} with contiguous tokens", f"{x.dtype} {list(x.shape)}, strides {x.stride()}"
            raise ValueError(explain(f"the KV cache's {name}", required=required, found=found, fix="convert it first"))
    check_device(k, v, *into)
    if T:
        store_kernel[(T, KH, 2)](
            k, v, *into, k.stride(0), v.stride(0), *strides, KH=KH, D=D, SIZE=size,
            HARDWARE=not triton.knobs.runtime.interpret, num_warps=WARPS, **COMPILER,
        )  # fmt: skip
