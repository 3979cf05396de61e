"""Convert per-row weight scales [N, G] to the block scales [ceil(N / 128), G] that DeepGEMM reads, in one launch.

A block whose rows differ in scale gets NaN: the error stays visible in the result and needs no GPU synchronization.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl_patch.fp8.formats import groups
from jetrl_patch.kernels.aot import Spec
from jetrl_patch.kernels.gemm_common import PINNED, check_device

#: groups per program
WIDTH = 32


@triton.jit
def block_scales_kernel(s, out, N, G, s_n, s_g, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    wide = tl.cdiv(G, WIDTH)
    block = tl.program_id(0) // wide
    n = block * 128 + tl.arange(0, 128)
    g = (tl.program_id(0) % wide) * WIDTH + tl.arange(0, WIDTH)
    inside = (n < N)[:, None] & (g < G)[None, :]
    first = tl.load(s + block * 128 * s_n + g * s_g, mask=g < G, other=0.0)
    rows = tl.load(s + n[:, None] * s_n + g[None, :] * s_g, mask=inside, other=0.0)
    other = tl.max(((rows != first[None, :]) & inside).to(tl.int32), 0)
    tl.store(out + block * G + g, tl.where(other == 0, first, float("nan")), mask=g < G)


def block_scales(s_NG: Tensor) -> Tensor:
    """FP32 [ceil(N / 128), G] from FP32 [N, G] with any strides; NaN if the rows of a block differ.

    Raises:
        TypeError: the scales are not FP32.
        ValueError, ConfigError: as ``check_device``.
    """
    if s_NG.dtype != torch.float32:
        raise TypeError(f"scales must be torch.float32, found {s_NG.dtype}")
    check_device(s_NG)
    N, G = s_NG.shape
    out = torch.empty(groups(N), G, dtype=torch.float32, device=s_NG.device)
    if out.numel():
        grid = (groups(N) * -(-G // WIDTH),)
        block_scales_kernel[grid](s_NG, out, N, G, *s_NG.stride(), WIDTH=WIDTH, num_warps=4, **PINNED)
    return out


KERNELS = (
    Spec(
        "block_scales",
        block_scales_kernel,
        {"s": "*fp32", "out": "*fp32", **dict.fromkeys(("N", "G", "s_n", "s_g"), "i32")},
        {"WIDTH": WIDTH},
        {"num_warps": 4, **PINNED},
        ("N",),
    ),
)
