"""The figures of one tensor: how much of it is left after the run's own quantizer.

For values x [M, K], codes q and scales s, with y = q * s what the GEMM multiplies and e = x - y:

    sqnr       = 10 log10( Σ x² / Σ e² )                        over the whole tensor
    slice_sqnr = -10 log10( mean over slices of Σ e² / Σ x² )   over rows and over columns; the lower of the two

A few outliers carry nearly all of a tensor's power and are quantized as well as anything, so ``sqnr`` stays near 31 dB
while their neighbours in the same block are lost. ``slice_sqnr`` counts every row (column) alike, and falls.
A value that is NaN or Inf, and the group that it takes along, is counted and left out of the sums.
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
#: of a tensor that is represented exactly; an infinity would spoil a chart
MOST_DB = 200.0
_CHUNK = 1 << 20  # values looked at together: what bounds the extra memory (on a GPU four times as many)
_BEYOND = FP8_MAX * (1 + 2.0**-10)  # amax / 448 is rounded, so the largest value may stand an ulp beyond 448


@dataclass(frozen=True)
class Figures:
    """Of one tensor of one layer, or the worst over ranks.

    Attributes:
        amax: the largest magnitude among finite values.
        saturated: share of values beyond 448 scales, whose magnitude was cut off.
        underflow: share of values that are not zero and became zero.
        sqnr: signal to quantization error in dB, whole tensor; NaN where nothing but zeros was seen.
        slice_sqnr: the same with every row, and every column, counted alike: the lower of the two. NaN as above, and
            for gradients, whose rows differ in size by nature.
        scale_min, scale_max: over groups that hold something; NaN where none does.
        nonfinite: number of NaN and Inf.
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
        """The lower of the two SQNR; NaN where there is none."""
        known = [value for value in (self.sqnr, self.slice_sqnr) if not math.isnan(value)]
        return min(known, default=math.nan)


def measure(x_MK: Tensor, q_MK: Tensor, s_MG: Tensor, slices: bool = True) -> Tensor:
    """The fields of ``Figures`` as FP64 [8] on the tensor's device, so that nothing waits for a GPU here.

    Args:
        x_MK: what was quantized, BF16 [M, K].
        q_MK: e4m3 [M, K].
        s_MG: FP32 scales of 1x128 groups [M, ceil(K/128)]; of a weight's blocks, once per row.
        slices: whether ``slice_sqnr`` is wanted.
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
    """The worst of several ranks' figures, figure by figure; a NaN gives way to a number."""
    by_field = list(zip(*(astuple(figures) for figures in found), strict=True))
    pick: Sequence[Reduce] = (max, max, max, min, min, min, max, max)
    return Figures(*(_known(choose, values) for choose, values in zip(pick, by_field, strict=True)))


def _known(choose: Reduce, values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return choose(known) if known else math.nan


def _of_slices(sums: Tensor) -> Tensor:
    """dB from the mean of error over signal, each slice with a signal counted alike."""
    error, signal = sums
    held = signal > 0
    return _db(torch.where(held, error / signal, 0.0).sum() / held.sum())


def _db(ratio: Tensor) -> Tensor:
    """-10 log10; NaN stays NaN."""
    return (-10 * torch.log10(ratio)).clamp(max=MOST_DB)


def _scale_range(s_MG: Tensor) -> tuple[Tensor, Tensor]:
    s = s_MG.double()
    held = torch.isfinite(s) & (s > 2 * AMAX_FLOOR / FP8_MAX)  # at the floor a group is empty, or as good as that
    inf, nan = torch.full_like(s, math.inf), s.new_full((), math.nan)
    if s.numel() == 0:
        return nan, nan
    any_held = held.any()
    low, high = torch.where(held, s, inf).amin(), torch.where(held, s, -inf).amax()
    return torch.where(any_held, low, nan), torch.where(any_held, high, nan)
