"""A row-parallel FP8 linear layer in a trainer that splits it over its own ranks (Megatron), with the bits of an exact rollout.

An exact rollout of R ranks adds R FP32 sums, one per range of K, in rank order and rounds once. A trainer of r ranks, where r
divides R, forms the same sums: each rank R/r of them. Every rank receives one slice of the rows of all sums, adds it and rounds
it. That is the result if ranks share the sequence (Megatron's sequence parallelism); otherwise they gather the BF16 slices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from jetrl_patch.backends import Backend
from jetrl_patch.backends.quantize import Quantized
from jetrl_patch.fp8.mixture import added
from jetrl_patch.kernels.formats import split_width


@dataclass(frozen=True)
class RowRanks:
    """The ranks that split the K columns of a row-parallel layer.

    Attributes:
        group: a ``torch.distributed`` group of at least two ranks.
        scattered: whether each rank keeps only its slice of the rows of Y, as with sequence parallelism.
    """

    group: Any
    scattered: bool

    def product(self, backend: Backend, x: Quantized, w: Quantized, splits: int) -> Tensor:
        """Y = bf16(sum over all ranks' ranges of K): BF16 [M, N], or [M / ranks, N] if the rows are scattered. Collective.

        Args:
            x: this rank's columns of X, [M, K].
            w: this rank's columns of W, [N, K].
            splits: ranges of K that the rollout adds one by one, of this rank's columns.
        """
        ranks = dist.get_world_size(self.group)
        sums_PMN = torch.stack([backend.gemm(a, b, torch.float32) for a, b in _ranges(x, w, splits)])
        P, M, N = sums_PMN.shape
        rows = -(-M // ranks)
        padded = torch.nn.functional.pad(sums_PMN, (0, 0, 0, rows * ranks - M))
        sent_RPmN = padded.view(P, ranks, rows, N).transpose(0, 1).contiguous()
        parts_RPmN = torch.empty_like(sent_RPmN)
        dist.all_to_all_single(parts_RPmN, sent_RPmN, group=self.group)
        slice_mN = added(parts_RPmN.view(ranks * P, rows, N))
        if self.scattered:
            return slice_mN
        every = torch.empty(ranks * rows, N, dtype=slice_mN.dtype, device=slice_mN.device)
        dist.all_gather_into_tensor(every, slice_mN, group=self.group)
        return every[:M]

    def held(self, rows: torch.Size) -> tuple[int, ...]:
        """The leading dimensions of this rank's part of Y, from those of X."""
        return (rows[0] // dist.get_world_size(self.group), *rows[1:]) if self.scattered else rows

    def whole(self, grad: Tensor) -> Tensor:
        """The gradient of all rows of Y, from that of this rank's rows [m, …, N]. Collective if the rows are scattered."""
        if not self.scattered:
            return grad
        ranks = dist.get_world_size(self.group)
        every = grad.new_empty(ranks * grad.shape[0], *grad.shape[1:])
        dist.all_gather_into_tensor(every, grad.contiguous(), group=self.group)
        return every


def _ranges(x: Quantized, w: Quantized, splits: int) -> Iterator[tuple[Quantized, Quantized]]:
    """The operands of each range of K."""
    if splits == 1:
        yield x, w
        return
    K = x.shape[1]
    step = split_width(K, splits, x.block)
    for k in range(0, K, step):
        yield x.columns(k, k + step), w.columns(k, k + step)
