"""Quantization statistics of one tensor, and the share of a weight's codes that a step leaves unchanged."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from jetrl_patch.kernels.formats import AMAX_FLOOR, BLOCK, FP8_MAX

__all__ = ["FIELDS", "MOST", "Codes", "Figures", "Reduce", "measure", "measure_each", "sample", "worst", "worst_of"]


# ---- Share of a weight's FP8 codes that an optimizer step leaves unchanged -----------------------
# An update much smaller than the spacing of the codes is invisible to the rollout (QuRL's weight-update problem, arXiv
# 2602.13953). Two weight syncs are compared on a fixed sample of the codes, which avoids a second copy of the weights.

MOST = 1 << 16  # codes kept per layer; the experts of a block are one


def sample(q_NK: Tensor, most: int = MOST) -> Tensor:
    """About ``most`` bytes of ``q`` [N, K] at fixed, evenly spaced positions; every byte of a small tensor."""
    flat = q_NK.detach().contiguous().view(torch.uint8).flatten()
    step = flat.numel() // most | 1  # odd, so that the sample visits every column of a weight of even width
    return flat[::step].clone()


class Codes:
    """Samples of the last sync, keyed by layer."""

    def __init__(self) -> None:
        self._last: dict[str, Tensor] = {}

    def compare(self, layer: str, q_NK: Tensor, most: int = MOST) -> Tensor | None:
        """Share of codes unchanged since the last ``compare`` or ``keep``, FP64; None if there was none."""
        last, now = self._last.get(layer), sample(q_NK, most)
        self._last[layer] = now
        return None if last is None else (last.to(now.device) == now).double().mean()

    def keep(self, layer: str, q_NK: Tensor, most: int = MOST) -> None:
        """Remember the codes for the next sync."""
        self._last[layer] = sample(q_NK, most)

    def drop(self) -> None:
        """Forget every sample; the next sync is not compared."""
        self._last.clear()


# ---- Quantization statistics of one tensor, measured on the output of the run's own quantizer ----
# For values x [M, K], codes q and scales s, let y = q * s (what the GEMM multiplies) and e = x - y:
#
#     sqnr       = 10 log10( Σ x² / Σ e² )                        over the whole tensor
#     slice_sqnr = -10 log10( mean over slices of Σ e² / Σ x² )   over rows and over columns; the lower of the two
#
# A few outliers carry nearly all of a tensor's power and quantize well, so ``sqnr`` stays near 31 dB while their neighbours
# in the same block are lost. ``slice_sqnr`` gives every row (column) equal weight, and drops.
# NaN and Inf are counted; they, and the groups they turn into NaN, are left out of the sums.
#
# The experts of a block are many tensors that count as one layer: its figures are the worst over them, each with the matrix that
# it is of.

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
        at: of the experts of a block, the number of the matrix that a figure is of (``units.matrix_name``), by the figure.
    """

    amax: float
    saturated: float
    underflow: float
    sqnr: float
    slice_sqnr: float
    scale_min: float
    scale_max: float
    nonfinite: float
    at: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, row: Sequence[float]) -> Figures:
        """Figures of a row of ``measure``, or of one of ``worst_of``."""
        values, places = row[: len(FIELDS)], row[len(FIELDS) :]
        at = {name: int(place) for name, place, value in zip(FIELDS, places, values, strict=False) if not math.isnan(value)}
        return cls(**dict(zip(FIELDS, values, strict=True)), at=at)

    @property
    def worst_figure(self) -> str:
        """The name of the lower of ``sqnr`` and ``slice_sqnr``."""
        return "slice_sqnr" if self.slice_sqnr == self.worst_db else "sqnr"

    @property
    def worst_db(self) -> float:
        """The lower of ``sqnr`` and ``slice_sqnr``; NaN if both are."""
        known = [value for value in (self.sqnr, self.slice_sqnr) if not math.isnan(value)]
        return min(known, default=math.nan)


#: the statistics, in the order of a row
FIELDS = ("amax", "saturated", "underflow", "sqnr", "slice_sqnr", "scale_min", "scale_max", "nonfinite")
#: how the worst of each is found; of a scale's range, both ends
_PICK: tuple[Reduce, ...] = (max, max, max, min, min, min, max, max)


def measure(x_MK: Tensor, q_MK: Tensor, s_MG: Tensor, slices: bool = True) -> Tensor:
    """The fields of ``Figures`` as FP64 [8] on the tensor's device, without a GPU synchronization.

    Args:
        x_MK: the quantizer's input, BF16 [M, K].
        q_MK: e4m3 [M, K].
        s_MG: FP32 scales of 1x128 groups [M, ceil(K/128)]; a weight's block scales repeated for every row.
        slices: whether to compute ``slice_sqnr``.
    """
    M, K = x_MK.shape
    sums = torch.zeros(3, dtype=torch.float64, device=x_MK.device)  # saturated, underflow, non-finite
    amax = torch.zeros((), dtype=torch.float64, device=x_MK.device)
    rows = torch.zeros(2, M, dtype=torch.float64, device=x_MK.device)  # error, signal
    columns = torch.zeros(2, K, dtype=torch.float64, device=x_MK.device)
    for part in _chunks(x_MK):
        found = _Chunk.of(x_MK[part], q_MK[part], s_MG[part])
        if found.amax_m.numel():
            amax = torch.maximum(amax, found.amax_m.amax())
        sums += found.counts_3m.sum(1)
        rows[:, part] = found.squares_2mk.sum(2)
        columns += found.squares_2mk.sum(1)
    count = max(1, M * K)
    error, signal = rows.sum(1)
    nan = torch.full_like(amax, math.nan)
    lowest = torch.minimum(_of_slices(rows), _of_slices(columns)) if slices else nan
    return torch.stack(
        [amax, sums[0] / count, sums[1] / count, _db(error / signal), lowest, *_scale_range(s_MG), sums[2]]
    )


def measure_each(
    x_MK: Tensor, q_MK: Tensor, s_MG: Tensor, expert_M: Tensor, experts: int, slices: bool = True
) -> Tensor:
    """``measure`` of the rows of each expert, FP64 [E, 8]: no row is moved, and no count is read back to the host.

    An expert without rows has zeros, and NaN where ``measure`` of no row has.

    Args:
        x_MK, q_MK, s_MG, slices: as for ``measure``.
        expert_M: the expert of each row, int64.
    """
    (M, K), device = x_MK.shape, x_MK.device
    sums = torch.zeros(3, experts, dtype=torch.float64, device=device)
    amax = torch.zeros(experts, dtype=torch.float64, device=device)
    rows = torch.zeros(2, M, dtype=torch.float64, device=device)
    columns = torch.zeros(2, experts, K, dtype=torch.float64, device=device)
    for part in _chunks(x_MK):
        found, expert = _Chunk.of(x_MK[part], q_MK[part], s_MG[part]), expert_M[part]
        amax.scatter_reduce_(0, expert, found.amax_m, "amax")
        sums.index_add_(1, expert, found.counts_3m)
        rows[:, part] = found.squares_2mk.sum(2)
        columns.index_add_(1, expert, found.squares_2mk)
    values = K * torch.zeros(experts, dtype=torch.float64, device=device).index_add_(0, expert_M, torch.ones_like(rows[0]))
    shares = sums[:2] / values.clamp(min=1)
    error, signal = columns.sum(2)
    lowest = torch.full_like(amax, math.nan)
    if slices:
        ratios, held = _ratios(rows)
        mean = torch.zeros_like(amax).index_add_(0, expert_M, ratios)
        mean = mean / torch.zeros_like(amax).index_add_(0, expert_M, held.double())
        ratios, held = _ratios(columns)
        lowest = torch.minimum(_db(mean), _db(ratios.sum(1) / held.sum(1)))
    low, high = _row_scales(s_MG)
    scale_min = torch.full_like(amax, math.inf).scatter_reduce_(0, expert_M, low, "amin")
    scale_max = torch.full_like(amax, -math.inf).scatter_reduce_(0, expert_M, high, "amax")
    some = scale_min <= scale_max
    ends = (torch.where(some, end, math.nan) for end in (scale_min, scale_max))
    return torch.stack([amax, *shares, _db(error / signal), lowest, *ends, sums[2]], 1)


def worst_of(rows_S8: Tensor, numbers: Sequence[int] | Tensor) -> Tensor:
    """The worst of each statistic over matrices and the numbers of the matrices that they are of, FP64 [16], on the device.

    Args:
        rows_S8: rows of ``measure``. numbers: of the matrices, [S].
    """
    unknown = rows_S8.isnan()
    lowest = torch.tensor([pick is min for pick in _PICK], device=rows_S8.device)
    signed = torch.where(lowest, -rows_S8, rows_S8).masked_fill(unknown, -math.inf)
    index = signed.argmax(0)
    values = rows_S8.gather(0, index.unsqueeze(0)).squeeze(0)
    return torch.cat([values, torch.as_tensor(numbers, device=rows_S8.device)[index].double()])


def worst(found: Sequence[Figures]) -> Figures:
    """The worst value of each statistic over ranks; NaN only where every rank has NaN."""
    values, at = dict.fromkeys(FIELDS, math.nan), dict[str, int]()
    for name, pick in zip(FIELDS, _PICK, strict=True):
        known = {value: figures.at for figures in found if not math.isnan(value := getattr(figures, name))}
        if known:
            values[name] = pick(list(known))
            place = known[values[name]].get(name)
            if place is not None:
                at[name] = place
    return Figures(**values, at=at)


def _chunks(x_MK: Tensor) -> Iterator[slice]:
    M, K = x_MK.shape
    step = max(1, (4 * _CHUNK if x_MK.is_cuda else _CHUNK) // max(1, K))
    yield from (slice(start, start + step) for start in range(0, M, step))


class _Chunk(NamedTuple):
    """Sums of m rows, FP64: the largest magnitude of each, counts (saturated, underflow, non-finite), squares (error, signal)."""

    amax_m: Tensor
    counts_3m: Tensor
    squares_2mk: Tensor

    @classmethod
    def of(cls, x_mK: Tensor, q_mK: Tensor, s_mG: Tensor) -> _Chunk:
        x, q = x_mK.double(), q_mK.double()
        s = s_mG.double().repeat_interleave(BLOCK, 1)[:, : x.shape[1]]
        y = q * s
        finite = torch.isfinite(x)
        ok = finite & torch.isfinite(y)
        amax = x.abs().where(finite, 0.0).amax(1)
        counts = torch.stack([ok & (x.abs() > s * _BEYOND), ok & (x != 0) & (q == 0), ~finite])
        x, y = torch.where(ok, x, 0.0), torch.where(ok, y, 0.0)
        return cls(amax, counts.sum(2).double(), torch.stack([(x - y).square(), x.square()]))


def _of_slices(sums: Tensor) -> Tensor:
    """dB of the mean error-to-signal ratio over the slices that have a signal."""
    ratios, held = _ratios(sums)
    return _db(ratios.sum() / held.sum())


def _ratios(sums: Tensor) -> tuple[Tensor, Tensor]:
    """Error over signal of each slice, 0 without a signal, and whether there is one."""
    error, signal = sums
    held = signal > 0
    return torch.where(held, error / signal, 0.0), held


def _db(ratio: Tensor) -> Tensor:
    """-10 log10; NaN stays NaN."""
    return (-10 * torch.log10(ratio)).clamp(max=MOST_DB)


def _scale_range(s_MG: Tensor) -> tuple[Tensor, Tensor]:
    if s_MG.numel() == 0:
        nan = s_MG.new_full((), math.nan, dtype=torch.float64)
        return nan, nan
    low, high = _row_scales(s_MG)
    low, high = low.amin(), high.amax()
    return torch.where(low <= high, low, math.nan), torch.where(low <= high, high, math.nan)


def _row_scales(s_MG: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest and the largest scale of each row over its groups that are not empty; Inf and -Inf if there are none."""
    s = s_MG.double()
    held = torch.isfinite(s) & (s > 2 * AMAX_FLOOR / FP8_MAX)  # at the floor, a group is empty or nearly so
    return torch.where(held, s, math.inf).amin(1), torch.where(held, s, -math.inf).amax(1)
