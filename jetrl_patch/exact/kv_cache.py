"""The FP8 KV cache of exact mode: the keys and values that attention reads, the same on both sides.

Each row x of a key (after RoPE) or value, one token and one head of width D, has its own scale:

    s = max(amax(|x|), 1e-10) / 448, rounded up to a power of two        q = e4m3(x / s)        x' = q s

x' is exact in BF16. So the trainer rounds its keys and values and runs the BF16 attention; a GPU's rollout stores q and s, and
its kernel computes the same x'. A CPU's rollout stores x' in BF16. The backward passes the gradient of x' to x unchanged.

Shape legend: T tokens, KH key/value heads, D head width.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from jetrl_patch.backends.quantize import scale_from_amax, to_fp8
from jetrl_patch.errors import ModelError, explain
from jetrl_patch.exact.dispatch import implementation
from jetrl_patch.kernels.formats import FP8

#: vLLM's name for a cache with room for one FP32 scale per token and head
VLLM_DTYPE = "fp8_per_token_head"


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """BF16 [..., D] -> e4m3 [..., D] and FP32 scales [...]. A NaN or Inf makes its scale NaN or Inf."""
    wide = x.float()
    scale = scale_from_amax(wide.abs().amax(-1), "pow2")
    return to_fp8(wide / scale.unsqueeze(-1)), scale


def dequantize(q: Tensor, scale: Tensor) -> Tensor:
    """e4m3, or its bytes in uint8, [..., D] and FP32 scales [...] -> BF16 [..., D], exactly."""
    return (q.view(FP8).float() * scale.unsqueeze(-1)).to(torch.bfloat16)


def rounded(k_TKD: Tensor, v_TKD: Tensor) -> tuple[Tensor, Tensor]:
    """The values of an FP8 cache: BF16 [T, KH, D] -> BF16 [T, KH, D], each."""
    if implementation(k_TKD) == "triton":
        from jetrl_patch.kernels import kv_cache

        return kv_cache.rounded(k_TKD, v_TKD)
    return dequantize(*quantize(k_TKD)), dequantize(*quantize(v_TKD))


class Pages(NamedTuple):
    """Views of one cache: bytes uint8 [blocks, block size, KH, D] and scales FP32 [blocks, block size, KH]."""

    k: Tensor
    v: Tensor
    k_scale: Tensor
    v_scale: Tensor

    @classmethod
    def of(cls, cache: Tensor, kv_heads: int, width: int) -> Pages:
        """View a cache, whose blocks hold [bytes of keys, of values, scales of keys, of values], in the order (token, head).

        In this order rows of bytes are aligned. Nothing else reads inside a block.

        Args:
            cache: uint8 [blocks, ...], each block dense in memory, in any order of its dimensions.

        Raises ModelError if the blocks do not hold whole tokens, or are not dense.
        """
        blocks, found, token = cache.shape[0], math.prod(cache.shape[1:]), kv_heads * (2 * width + 8)
        size = found // token
        dense = 1 + sum((n - 1) * stride for n, stride in zip(cache.shape[1:], cache.stride()[1:], strict=True))
        if cache.dtype != torch.uint8 or found != size * token or dense != found:
            required = f"uint8 in dense blocks of whole tokens, {token} bytes each"
            layout = f"{cache.dtype} {list(cache.shape)} with strides {list(cache.stride())}"
            fix = "use a supported version of vLLM, or drop kv_cache"
            raise ModelError(explain("vLLM's FP8 KV cache", required=required, found=layout, fix=fix))
        pages = cache.as_strided((blocks, found), (cache.stride(0), 1))
        ends = (size * kv_heads * width, 2 * size * kv_heads * width)
        k, v = (part.unflatten(1, (size, kv_heads, width)) for part in (pages[:, : ends[0]], pages[:, ends[0] : ends[1]]))
        scales = pages[:, ends[1] :].view(torch.float32).unflatten(1, (2, size, kv_heads))
        return cls(k, v, scales[:, 0], scales[:, 1])

    def store(self, k_TKD: Tensor, v_TKD: Tensor, slots: Tensor) -> None:
        """Quantize BF16 [T, KH, D] into the slots int64 [T]; slot -1 is padding. The host does not wait for a GPU."""
        if implementation(k_TKD) == "triton":
            from jetrl_patch.kernels import kv_cache

            return kv_cache.store(k_TKD, v_TKD, slots, self)
        real = slots >= 0
        block, row = slots[real] // self.k.shape[1], slots[real] % self.k.shape[1]
        for x, into, scales in ((k_TKD, self.k, self.k_scale), (v_TKD, self.v, self.v_scale)):
            q, scale = quantize(x[real])
            into[block, row], scales[block, row] = q.view(torch.uint8), scale
        return None
