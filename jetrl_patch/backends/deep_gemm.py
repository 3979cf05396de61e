"""DeepGEMM on Hopper, installed separately or bundled with a CUDA build of vLLM.

``fp8_gemm_nt((a [M, K], sa [M, K/128]), (b [N, K], sb), d [M, N], c)`` computes ``a b^T``, all row-major:

| recipe        | kernel | sb               | d    | c            | used for                                         |
| (1, 128, 128) | 1D2D   | [N/128, K/128]   | BF16 | none         | FProp with block scales, DGrad                   |
| (1, 1, 128)   | 1D1D   | [N, K/128]       | FP32 | d, added to  | FP32 partial sums, scales per row, WGrad in FP32 |

DeepGEMM does not check some of its requirements, or only when nvcc compiles a kernel. This module meets them:

- 1D1D assumes rows K apart, whatever the strides say: a range of columns is copied first;
- for M <= 32, 1D1D's heuristic may choose a tile of 16 or 32 rows, which the kernel does not compile with: M is padded to 64;
- a kernel is compiled for the sizes that ``compiled_dims`` names. For weight gradients these are the two of dW, because their K,
  the number of tokens, differs in every micro-batch and nvcc takes seconds;
- 1D1D adds to d in memory. A main gradient is passed as it is; a new d starts as zeros;
- nvcc runs inside a product, in the thread that holds Python's lock, and takes seconds. Its result is a folder that is renamed
  into a cache on disk, under a hash of the source, the compiler and its flags, and each product looks there first. So processes
  that make the same products before their first use, each in an order of its own, share the work and need not talk to each
  other. They are the ranks: another process would need a CUDA context and its half a gigabyte, because only a product compiles;
- TMA needs addresses at multiples of 16 bytes, and row scales as columns whose pitch is a multiple of 4. The quantizing kernels
  write them so. Other layouts are copied here; DeepGEMM would copy them with a kernel that it compiles for each K.

A dW in BF16 would take zeros, the sum and a cast: 18 bytes moved per element instead of 2. cuBLASLt has the same product, with
one scale per row and group on both sides, and rounds inside it. So if torch offers it, cuBLASLt computes the BF16 dW, which no
other process has to match.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from jetrl_patch.backends import cublaslt
from jetrl_patch.backends.capability import check_cublaslt, find_deep_gemm
from jetrl_patch.backends.gpu import GpuBackend, check_widths
from jetrl_patch.backends.quantize import Quantized
from jetrl_patch.errors import ConfigError
from jetrl_patch.kernels.formats import FP8, check_fprop, groups, split_width

logger = logging.getLogger(__name__)

BLOCKS, ROWS = (1, 128, 128), (1, 1, 128)
#: up to this many rows are padded to ``TILE`` for 1D1D
FEW, TILE = 32, 64
#: TMA's alignment in bytes, and in FP32 scales
ALIGN, PITCH = 16, 4
#: a trainer compiles for batches from this share of the largest on
SHARE = 8
#: batches above this are tried at wider distances, because there a tile serves many
MANY = 1 << 14


class DeepGemmBackend(GpuBackend):
    """Finds the module when it is constructed."""

    name = "deep_gemm"
    columns = True
    blocks = True
    #: whether cuBLASLt computes weight gradients in BF16
    rounds = False

    def __init__(self) -> None:
        module, reason = find_deep_gemm()
        if module is None:
            raise ConfigError(f'backend="deep_gemm" cannot run here: {reason}. Use a CUDA build of vLLM, or backend="triton".')
        self._module: Any = module
        self._compiled: dict[tuple[int, int, bool], int] = {}  # [N, K], with scales in blocks -> rows that a trainer compiled for
        self.rounds = check_cublaslt()[0]

    def gemm(self, x: Quantized, w: Quantized, out_dtype: torch.dtype, splits: int = 1) -> Tensor:
        N, K = w.shape
        if splits == 1 and out_dtype == torch.bfloat16 and w.s_blocks is not None:
            check_fprop(x.q, x.s_rows, w.q, w.s_blocks, out_dtype, blocks=True)
            check_widths(self.name, K, N)
            return self._blocks(x.q, x.s_rows, w.q, w.s_blocks)
        check_fprop(x.q, x.s_rows, w.q, w.s_rows, out_dtype)
        step, total = split_width(K, splits), None
        check_widths(self.name, K, N)
        for k in range(0, K, step):  # each range adds to the total of those before it, as the ranks' sums are added
            (a, sa), (b, sb) = x.columns(k, k + step), w.columns(k, k + step)
            total = self._rows(a, sa, b, sb, total)
        assert total is not None
        return total[: x.shape[0]].to(out_dtype)

    def compiled_rows(self, most: int) -> Sequence[int]:
        """A kernel is compiled for each [N, K] and tile.

        The tile depends on M only through ceil(M / height), for heights of 64, 128 and 256, and of 16 and 32 if M is not above
        them. Older versions also compare M with the heights and with 512. So all M in a range (64 j, 64 j + 64] share a tile,
        except at those bounds. Small batches tend to come first, because a tile serves few of them.
        """
        rows = {16, 32, 63, 127, 255, 511, *range(64, most, 64)}
        chance = random.Random()  # not Python's own generator, to which all ranks give one seed
        return sorted({most, *(row for row in rows if row < most)}, key=lambda row: chance.expovariate(1 / row))

    def compile_ahead(self, rows: int, w: Quantized, splits: int) -> None:
        N, K = w.shape
        self._ahead(rows, N, K // splits, splits == 1 and w.s_blocks is not None, w.q.device)

    def _ahead(self, rows: int, N: int, K: int, blocks: bool, device: torch.device) -> None:
        """Compile a trainer's kernels up to the next power of two, and log it if that took time."""
        if rows <= self._compiled.get((N, K, blocks), 0):
            return
        check_widths(self.name, K, N)
        self._compiled[N, K, blocks] = most = 1 << (rows - 1).bit_length()
        step, start = 64 * max(1, most // MANY), time.monotonic()
        try:
            for M in self.compiled_rows(most):
                if most <= SHARE * M and (most <= MANY or M % step == 0):
                    a, b = (torch.empty(size, K, dtype=FP8, device=device) for size in (M, N))
                    heights = M, groups(N) if blocks else N
                    sa, sb = (torch.empty(size, groups(K), dtype=torch.float32, device=device) for size in heights)
                    (self._blocks if blocks else self._rows)(a, sa, b, sb)
        except RuntimeError as error:  # no memory for more rows than the batch has, for example
            logger.warning("jetrl_patch: FP8 kernels for [%d, %d] are compiled when first used: %s", N, K, error)
        if (took := time.monotonic() - start) > 1:
            logger.info("jetrl_patch: FP8 kernels for [%d, %d], up to %d rows, are compiled, %.1f s", N, K, most, took)

    def dgrad_product(self, dy: Quantized, w: Quantized, out_dtype: torch.dtype) -> Tensor:
        check_widths(self.name, *w.shape)
        self._ahead(dy.q.shape[0], w.shape[1], w.shape[0], True, dy.q.device)
        return self._blocks(dy.q, dy.s, self.transposed(w), w.s.t()).to(out_dtype)

    def wgrad_product(self, dy: Quantized, x: Quantized, out_dtype: torch.dtype) -> Tensor:
        check_widths(self.name, dy.shape[0], x.shape[0])
        if self.rounds and out_dtype == torch.bfloat16:
            return cublaslt.row_product(dy.q, dy.s.t(), x.q, x.s.t(), out_dtype)
        return self._rows(dy.q, dy.s.t(), x.q, x.s.t(), compiled="mn")[: dy.shape[0]].to(out_dtype)

    def add_wgrad_product(self, dy: Quantized, x: Quantized, main: Tensor) -> None:
        """1D1D adds to a main gradient that TMA can write and that is high enough for a tile."""
        check_widths(self.name, dy.shape[0], x.shape[0])
        if dy.shape[0] <= FEW or not main.is_contiguous() or main.data_ptr() % ALIGN:
            return super().add_wgrad_product(dy, x, main)
        self._rows(dy.q, dy.s.t(), x.q, x.s.t(), main, compiled="mn")

    def _blocks(self, a: Tensor, sa: Tensor, b: Tensor, sb: Tensor) -> Tensor:
        """The BF16 product; b [N, K] has one scale per 128x128 block."""
        d = a.new_empty(a.shape[0], b.shape[0], dtype=torch.bfloat16)
        if d.numel():
            self._module.fp8_gemm_nt((packed(a), pitched(sa)), (packed(b), row_major(sb)), d, recipe=BLOCKS)
        return d

    def _rows(
        self, a: Tensor, sa: Tensor, b: Tensor, sb: Tensor, total: Tensor | None = None, compiled: str = "nk"
    ) -> Tensor:
        """The FP32 product, added to ``total`` if given; both operands have one scale per row and group. Few rows are padded."""
        M = a.shape[0]
        if 0 < M <= FEW:
            a = F.pad(packed(a).view(torch.uint8), (0, 0, 0, TILE - M)).view(FP8)
            sa = F.pad(sa.t(), (0, TILE - M)).t()
        d = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float32, device=a.device) if total is None else total
        if d.numel():
            operands = ((packed(a), pitched(sa)), (packed(b), pitched(sb)))
            self._module.fp8_gemm_nt(*operands, d, c=d, recipe=ROWS, compiled_dims=compiled)
        return d


def packed(q: Tensor) -> Tensor:
    """An e4m3 matrix [R, K] with strides (K, 1) at a multiple of 16 bytes, copied if it is not one."""
    if q.stride() == (q.shape[1], 1) and q.data_ptr() % ALIGN == 0:
        return q
    return q.view(torch.uint8).clone(memory_format=torch.contiguous_format).view(FP8)


def pitched(s: Tensor) -> Tensor:
    """Row scales [R, G] with strides (1, R rounded up to 4) at a multiple of 16 bytes, copied if they are not."""
    R, G = s.shape
    pitch = -(-R // PITCH) * PITCH
    if s.stride() == (1, pitch) and s.data_ptr() % ALIGN == 0:
        return s
    copy = s.new_empty(G, pitch)[:, :R].t()
    return copy.copy_(s)


def row_major(s: Tensor) -> Tensor:
    """Scales [R, G] with strides (G, 1), copied if they have others, even in a dimension of 1, where torch ignores strides."""
    return s if s.stride() == (s.shape[1], 1) else torch.empty_like(s, memory_format=torch.contiguous_format).copy_(s)
