"""A test double of DeepGEMM without a GPU: the library's assertions and tiles on sm_90, computed by the oracle.

Written after DeepGEMM's C++ and CUDA sources (``tests/anchors/deep_gemm.json`` names revisions and files). Where the library
silently reads wrong memory, the double raises. It also refuses what TMA and nvcc refuse.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from jetrl_patch.backends import quantize

BLOCK = 128
#: shared memory of a block, bytes of an H100's L2 and L1 a cycle, and SMs
SHARED, SMS = 232448, 132


class Refused(RuntimeError):
    """An assertion of the library, of its compiler or of the driver."""


class Tile(NamedTuple):
    """The heuristic's choice. It is part of a kernel's source, so another value needs another compilation."""

    block_m: int
    block_n: int
    cluster_m: int
    cluster_n: int
    stages: int


def need(ok: bool, what: str) -> None:
    if not ok:
        raise Refused(what)


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def aligned(size: int, to: int) -> int:
    return cdiv(size, to) * to


class DeepGemm:
    """A double of the module. ``compiled`` holds each kernel that nvcc built, ``copies`` counts scales in a foreign layout."""

    def __init__(self, sms: int = SMS) -> None:
        self.sms = sms
        self.compiled: set[tuple[object, ...]] = set()
        self.calls: list[tuple[str, int, int, int]] = []
        self.copies = 0

    def fp8_gemm_nt(self, a, b, d, c=None, recipe=None, recipe_a=None, recipe_b=None, compiled_dims="nk", disable_ue8m0_cast=False):  # type: ignore[no-untyped-def]  # noqa: E501  # fmt: skip
        (a, sa), (b, sb) = a, b
        for t in (a, b, d):
            need(t.dim() == 2 and (t.stride(0) == 1 or t.stride(1) == 1), "major_check")
            need(t.stride(1) == 1, "K-major operands and N-major output")
        need(a.dtype == b.dtype == torch.float8_e4m3fn, "e4m3 operands")
        (M, K), N = a.shape, b.shape[0]
        need(b.shape[1] == K and d.shape == (M, N), "shapes")
        need(d.dtype in (torch.bfloat16, torch.float32), "output dtype")
        if M == 0 or N == 0:
            return
        same = c is not None and c.data_ptr() == d.data_ptr()
        if c is not None:
            need(not same or (c.shape == d.shape and c.stride() == d.stride()), "c and d are one tensor")
            need(c.dtype == d.dtype == torch.float32 and c.stride(1) == 1, "c is FP32")
        if K == 0:
            if not same:
                d.copy_(c) if c is not None else d.zero_()
            return
        if c is not None and not same:
            d.copy_(c)
        need(recipe_a is None and recipe_b is None, "the project names recipes of three")
        recipe = recipe or (1, BLOCK, BLOCK)
        need(recipe in ((1, 1, BLOCK), (1, BLOCK, BLOCK)), "Unknown SF transformation")
        sa = self._row_scales(sa, M, K)
        need(self.sms % 2 == 0, "an even number of SMs")
        need(compiled_dims and set(compiled_dims) <= set("mnk"), "compiled_dims")
        if recipe[1] == 1:
            self._1d1d(a, sa, b, self._row_scales(sb, N, K), c, d, compiled_dims)
        else:
            self._1d2d(a, sa, b, self._block_scales(sb, N, K), c, d, compiled_dims)

    def _1d1d(self, a: Tensor, sa: Tensor, b: Tensor, sb: Tensor, c: Tensor | None, d: Tensor, dims: str) -> None:
        (M, K), N = a.shape, b.shape[0]
        need(c is not None and d.dtype == torch.float32, "1D1D adds to an FP32 output")
        for t in (a, b):
            need(t.stride(0) == K, "1D1D would read rows at a distance of K: wrong memory")
            tma(t, K)
        tile = best_tile("1d1d", M, N, K, self.sms)
        need(tile.block_m in (64, 128), f"NVCC compilation failed: BLOCK_M = {tile.block_m} % WGMMA::M")
        tma(d, d.stride(0))
        self._compile("1d1d", M, N, K, tile, dims)
        d.add_(self.product(a, sa, b, sb, torch.float32, tile))

    def _1d2d(self, a: Tensor, sa: Tensor, b: Tensor, sb: Tensor, c: Tensor | None, d: Tensor, dims: str) -> None:
        (M, K), N = a.shape, b.shape[0]
        need(c is None and d.dtype == torch.bfloat16, "1D2D writes BF16 and adds to nothing")
        need(N % 8 == 0, "the kernel traps: shape_n % 8")
        for t in (a, b, d):
            tma(t, t.stride(0))
        tile = best_tile("1d2d", M, N, K, self.sms)
        self._compile("1d2d", M, N, K, tile, dims)
        d.copy_(self.product(a, sa, b, quantize.expand_weight_scale(sb.contiguous(), N), torch.bfloat16, tile))

    def product(self, a: Tensor, sa: Tensor, b: Tensor, sb: Tensor, out_dtype: torch.dtype, tile: Tile) -> Tensor:
        """A double that is not row-invariant overrides this."""
        return quantize.fprop(a.contiguous(), sa.contiguous(), b.contiguous(), sb.contiguous(), out_dtype)

    def _compile(self, kernel: str, M: int, N: int, K: int, tile: Tile, dims: str) -> None:
        fixed = tuple(size for name, size in zip("mnk", (M, N, K), strict=True) if name in dims)
        self.compiled.add((kernel, *fixed, tile))
        self.calls.append((kernel, M, N, K))

    def _row_scales(self, s: Tensor, rows: int, K: int) -> Tensor:
        need(s.dtype == torch.float32 and s.shape == (rows, cdiv(K, BLOCK)), "one FP32 scale per row and group")
        if s.stride() == (1, aligned(rows, 4)):
            need(s.data_ptr() % 16 == 0, "cuTensorMapEncodeTiled: the scales' address")
            return s
        self.copies += 1
        if s.is_contiguous():
            G = s.shape[1]
            need(64 * (G + 1 - G % 2) * 4 <= SHARED, "shared memory of the transposing kernel")
            self.compiled.add(("transpose", G))
        return s

    def _block_scales(self, s: Tensor, N: int, K: int) -> Tensor:
        need(s.dtype == torch.float32 and s.shape == (cdiv(N, BLOCK), cdiv(K, BLOCK)), "one FP32 scale per block")
        plain = s.stride() == (s.shape[1], 1)
        need(plain or s.stride() == (1, s.shape[0]), "block scales are contiguous, or their transpose is")
        return s


def tma(t: Tensor, pitch: int) -> None:
    """cuTensorMapEncodeTiled of a matrix with ``pitch`` elements between rows."""
    need(t.data_ptr() % 16 == 0, "cuTensorMapEncodeTiled: the address is no multiple of 16 bytes")
    need(pitch * t.element_size() % 16 == 0, "cuTensorMapEncodeTiled: the row pitch is no multiple of 16 bytes")


def best_tile(kernel: str, M: int, N: int, K: int, sms: int = SMS) -> Tile:
    """The tile with the fewest estimated cycles, the first of equals; 1D1D writes FP32, 1D2D BF16."""
    return min(_candidates(kernel, M, N, K, sms), key=lambda tile: _cycles(kernel, tile, M, N, K, sms))


def _candidates(kernel: str, M: int, N: int, K: int, sms: int) -> list[Tile]:
    fp32 = kernel == "1d1d"
    heights = [64, 128] + [16] * (M <= 16) + [32] * (M <= 32) + [256] * (not fp32)
    widths = [16, *range(24, 161, 16)] if fp32 else [*range(16, 193, 16)]
    found = []
    for cluster_m, cluster_n in ((1, 1), (1, 2), (2, 1)):
        if sms % (cluster_m * cluster_n):
            continue
        for m in heights:
            for n in widths:
                rest = n - BLOCK
                if (not fp32 and rest > 0 and n % rest and BLOCK % rest) or (m > 128 and n > 128):
                    continue
                stages = _stages(fp32, m, n, K)
                if stages >= (3 if m * n >= 128 * 192 else 4):
                    found.append(Tile(m, n, cluster_m, cluster_n, stages))
    return found


def _stages(fp32: bool, m: int, n: int, K: int) -> int:
    output, barriers = aligned(m * n * (4 if fp32 else 2), 1024), 16 * 8 * 2
    blocks = 0 if fp32 else aligned(cdiv(K, BLOCK) * 4 * (1 if BLOCK % n == 0 else 2), 8)
    stage = (m + n) * BLOCK + aligned(m * 4, 128) + (aligned(n * 4, 128) if fp32 else 0)
    return min((SHARED - output - barriers - blocks) // stage, 16)


def _cycles(kernel: str, tile: Tile, M: int, N: int, K: int, sms: int) -> int:
    fp32 = kernel == "1d1d"
    m, n, cluster_m, cluster_n, _ = tile
    count = cdiv(M, m) * cdiv(N, n)
    waves = cdiv(count, sms)
    if cluster_m * cluster_n > 1 and waves <= 1:
        return 2**63 - 1
    output = m * n * (4 if fp32 else 2)
    outputs = output * (2 if fp32 else 1)  # read and written where the kernel adds
    l2 = (K * (m // cluster_n + n // cluster_m) + outputs) * count // int(min(64.0 * sms, 8e6 / 1.3e3))
    l1 = (K * (m + n) + K * (max(64, m) + n) + output + outputs) * count // (128 * sms)
    efficiency = np.float32(count) / np.float32(waves * sms)
    return int(np.float32(max(l1, l2)) / efficiency)
