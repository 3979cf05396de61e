"""Quantization statistics of one tensor, measured on the output of the run's own quantizer.

For values x [M, K], codes q and scales s, let y = q * s (what the GEMM multiplies) and e = x - y:

    sqnr       = 10 log10( Σ x² / Σ e² )                        over the whole tensor
    slice_sqnr = -10 log10( mean over slices of Σ e² / Σ x² )   over rows and over columns; the lower of the two

A few outliers carry nearly all of a tensor's power and quantize well, so ``sqnr`` stays near 31 dB while their neighbours
in the same block are lost. ``slice_sqnr`` gives every row (column) equal weight, and drops.
NaN and Inf are counted; they, and the groups they turn into NaN, are left out of the sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from jetrl_patch.fp8.formats import AMAX_FLOOR, BLOCK, FP8_MAX

__all__ = ["Figures", "Reduce", "measure", "worst"]

Reduce = Callable[[Sequence[float]], float]
#: reported for a tensor that FP8 represents exactly; an infinity would break a chart's axis
MOST_DB = 200.0
_CHUNK = 1 << 20  # values per pass, which bounds the extra memory (four times as many on a GPU)
_BEYOND = FP8_MAX * (1 + 2.0**-10)  # amax / 448 is rounded, so the largest value may exceed 448 scales by an ulp


@dataclass(frozen=True)
class Figures:
    """Statistics of one tensor of one layer, or the worst over ranks.

    Attributes:
        amax: largest finite magnitude.
        saturated: share of values beyond 448 scales, which were clamped.
        underflow: share of nonzero values that became zero.
        sqnr: signal to quantization noise in dB over the whole tensor; NaN for an all-zero tensor.
        slice_sqnr: the same with every row (column) weighted equally; the lower of the two. NaN as above, and
            for gradients, whose rows differ in magnitude by nature.
        scale_min, scale_max: over nonempty groups; NaN if there are none.
        nonfinite: number of NaN and Inf values.
    """

    amax: float
    saturated: float
    underflow: float
    sqnr: float
    slice_sqnr: float
    scale_min: float
    scale_max: float
    nonfinite: float

    @property
    def worst_db(self) -> float:
        """The lower of ``sqnr`` and ``slice_sqnr``; NaN if both are."""
        known = [value for value in (self.sqnr, self.slice_sqnr) if not math.isnan(value)]
        return min(known, default=math.nan)


def measure(x_MK: Tensor, q_MK: Tensor, s_MG: Tensor, slices: bool = True) -> Tensor:
    """The fields of ``Figures`` as FP64 [8] on the tensor's device, without a GPU synchronization.

    Args:
        x_MK: the quantizer's input, BF16 [M, K].
        q_MK: e4m3 [M, K].
        s_MG: FP32 scales of 1x128 groups [M, ceil(K/128)]; a weight's block scales repeated for every row.
        slices: whether to compute ``slice_sqnr``.
    """
    M, K = x_MK.shape
    sums = torch.zeros(4, dtype=torch.float64, device=x_MK.device)  # saturated, underflow, non-finite, -
    amax = torch.zeros((), dtype=torch.float64, device=x_MK.device)
    rows = torch.zeros(2, M, dtype=torch.float64, device=x_MK.device)  # error, signal
    columns = torch.zeros(2, K, dtype=torch.float64, device=x_MK.device)
    step = max(1, (4 * _CHUNK if x_MK.is_cuda else _CHUNK) // max(1, K))
    for start in range(0, M, step):
        part = slice(start, start + step)
        x = x_MK[part].double()
        s = s_MG[part].double().repeat_interleave(BLOCK, 1)[:, :K]
        q = q_MK[part].double()
        y = q * s
        finite = torch.isfinite(x)
        ok = finite & torch.isfinite(y)
        x, y = torch.where(ok, x, 0.0), torch.where(ok, y, 0.0)
        if x.numel():
            amax = torch.maximum(amax, x_MK[part].double().abs().where(finite, 0.0).amax())
        sums[0] += (ok & (x.abs() > s * _BEYOND)).sum()
        sums[1] += (ok & (x != 0) & (q == 0)).sum()
        sums[2] += (~finite).sum()
        for at, squares in enumerate(((x - y).square(), x.square())):
            rows[at, part] = squares.sum(1)
            columns[at] += squares.sum(0)
    count = max(1, M * K)
    error, signal = rows.sum(1)
    nan = torch.full_like(amax, math.nan)
    lowest = torch.minimum(_of_slices(rows), _of_slices(columns)) if slices else nan
    return torch.stack(
        [amax, sums[0] / count, sums[1] / count, _db(error / signal), lowest, *_scale_range(s_MG), sums[2]]
    )


def worst(found: Sequence[Figures]) -> Figures:
    """The worst value of each statistic over ranks; NaN only where every rank has NaN."""
    by_field = list(zip(*(astuple(figures) for figures in found), strict=True))
    pick: Sequence[Reduce] = (max, max, max, min, min, min, max, max)
    return Figures(*(_known(choose, values) for choose, values in zip(pick, by_field, strict=True)))


def _known(choose: Reduce, values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return choose(known) if known else math.nan


def _of_slices(sums: Tensor) -> Tensor:
    """dB of the mean error-to-signal ratio over the slices that have a signal."""
    error, signal = sums
    held = signal > 0
    return _db(torch.where(held, error / signal, 0.0).sum() / held.sum())


def _db(ratio: Tensor) -> Tensor:
    """-10 log10; NaN stays NaN."""
    return (-10 * torch.log10(ratio)).clamp(max=MOST_DB)


def _scale_range(s_MG: Tensor) -> tuple[Tensor, Tensor]:
    s = s_MG.double()
    held = torch.isfinite(s) & (s > 2 * AMAX_FLOOR / FP8_MAX)  # at the floor, a group is empty or nearly so
    inf, nan = torch.full_like(s, math.inf), s.new_full((), math.nan)
    if s.numel() == 0:
        return nan, nan
    any_held = held.any()
    low, high = torch.where(held, s, inf).amin(), torch.where(held, s, -inf).amax()
    return torch.where(any_held, low, nan), torch.where(any_held, high, nan)
