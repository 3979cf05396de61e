"""The statistics of a tensor against their definition in plain numpy, value by value."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jetrl_patch.backends.quantize import expand_weight_scale, quantize_activation, quantize_weight
from jetrl_patch.measure import statistics
from jetrl_patch.measure.statistics import MOST_DB, Figures, measure, measure_each, worst, worst_of


def by_hand(x: np.ndarray, q: np.ndarray, s: np.ndarray) -> dict[str, float]:
    """From float64 arrays: x, q [M, K], s [M, G]."""
    M, K = x.shape
    amax = saturated = underflow = nonfinite = 0.0
    error, signal = np.zeros((M, K)), np.zeros((M, K))
    for m in range(M):
        for k in range(K):
            scale, y = s[m, k // 128], q[m, k] * s[m, k // 128]
            if not np.isfinite(x[m, k]):
                nonfinite += 1
                continue
            amax = max(amax, abs(x[m, k]))
            if not np.isfinite(y):
                continue
            saturated += abs(x[m, k]) > 448 * scale * (1 + 2.0**-10)
            underflow += x[m, k] != 0 and q[m, k] == 0
            error[m, k], signal[m, k] = (x[m, k] - y) ** 2, x[m, k] ** 2
    slices = []
    for axis in (0, 1):
        ratios = [e / v for e, v in zip(error.sum(axis), signal.sum(axis)) if v > 0]
        slices.append(db(sum(ratios) / len(ratios)) if ratios else math.nan)
    floor = 2e-10 / 448
    held = [v for v in s.ravel() if np.isfinite(v) and v > floor]
    return {
        "amax": amax,
        "saturated": saturated / (M * K),
        "underflow": underflow / (M * K),
        "sqnr": db(error.sum() / signal.sum()) if signal.sum() else math.nan,
        "slice_sqnr": min(slices) if not any(map(math.isnan, slices)) else math.nan,
        "scale_min": min(held, default=math.nan),
        "scale_max": max(held, default=math.nan),
        "nonfinite": nonfinite,
    }


def db(ratio: float) -> float:
    return min(MOST_DB, -10 * math.log10(ratio)) if ratio > 0 else MOST_DB


def found(x: torch.Tensor, q: torch.Tensor, s: torch.Tensor, **options: Any) -> Figures:
    return Figures(*measure(x, q, s, **options).tolist())


def assert_same(ours: Figures, wanted: dict[str, float]) -> None:
    for name, value in wanted.items():
        if name == "at":
            assert ours.at == value
            continue
        assert getattr(ours, name) == pytest.approx(value, rel=1e-9, abs=1e-12, nan_ok=True), (name, ours, wanted)


KINDS = ("normal", "tiny", "outlier", "zeros", "nan", "inf", "exact")


def make(kind: str, rows: int, columns: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    if kind == "tiny":
        x *= 1e-12
    elif kind == "outlier":
        x[seed % rows] *= 1e6
        x[:, seed % columns] *= 1e5
    elif kind == "zeros":
        x[:, : columns // 2] = 0
        x[seed % rows] = 0
    elif kind in ("nan", "inf"):
        x[seed % rows, seed % columns] = float(kind)
    elif kind == "exact":
        x = x.sign()
    return x.to(torch.bfloat16)


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    rows=st.integers(1, 9),
    columns=st.integers(1, 300),
    seed=st.integers(0, 10_000),
    scale_format=st.sampled_from(["pow2", "fp32"]),
    chunk=st.sampled_from([1, 500, 1 << 20]),
)
def test_figures_are_the_definitions(
    kind: str, rows: int, columns: int, seed: int, scale_format: Any, chunk: int
) -> None:
    x = make(kind, rows, columns, seed)
    q, s = quantize_activation(x, scale_format)
    whole, statistics._CHUNK = statistics._CHUNK, chunk
    try:
        ours = found(x, q, s)
    finally:
        statistics._CHUNK = whole
    assert_same(ours, by_hand(x.double().numpy(), q.double().numpy(), s.double().numpy()))
    assert ours.saturated == 0  # scales follow the values


@settings(max_examples=20, deadline=None)
@given(factor=st.floats(0.01, 4), seed=st.integers(0, 1000))
def test_scales_that_do_not_follow_saturate(factor: float, seed: int) -> None:
    """A quantizer with independent scales, such as delayed or static scaling."""
    x = make("normal", 7, 200, seed)
    _, s = quantize_activation(x, "fp32")
    s = s * factor
    rows = s.repeat_interleave(128, 1)[:, :200]
    q = (x.float() / rows).clamp(-448, 448).to(torch.float8_e4m3fn)
    ours = found(x, q, s)
    assert_same(ours, by_hand(x.double().numpy(), q.double().numpy(), s.double().numpy()))
    if factor < 0.99:
        assert ours.saturated > 0


def test_a_weight_is_measured_with_the_scales_of_its_blocks() -> None:
    w = make("outlier", 200, 300, 3)
    q, blocks = quantize_weight(w, "pow2")
    ours = found(w, q, expand_weight_scale(blocks, 200))
    y = q.double() * blocks.double().repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :300]
    error = ((w.double() - y) ** 2).sum() / (w.double() ** 2).sum()
    assert ours.sqnr == pytest.approx(-10 * math.log10(error))


def test_outliers_hide_from_the_whole_tensor_and_not_from_its_slices() -> None:
    w = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    healthy = found(w.bfloat16(), *_weight(w.bfloat16()))
    w[[3, 7]] *= 1e5
    ill = found(w.bfloat16(), *_weight(w.bfloat16()))
    assert healthy.sqnr > 31 < healthy.slice_sqnr
    assert ill.sqnr > 30, "nearly all power lies in the outliers, which are quantized well"
    assert ill.slice_sqnr == ill.worst_db < 10


def _weight(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    q, blocks = quantize_weight(w, "pow2")
    return q, expand_weight_scale(blocks, w.shape[0])


def test_nothing_but_zeros_and_nothing_at_all() -> None:
    for shape in ((4, 130), (0, 130)):
        x = torch.zeros(shape, dtype=torch.bfloat16)
        ours = found(x, *quantize_activation(x, "pow2"))
        assert (ours.amax, ours.saturated, ours.underflow, ours.nonfinite) == (0, 0, 0, 0)
        assert all(map(math.isnan, (ours.sqnr, ours.slice_sqnr, ours.scale_min, ours.scale_max, ours.worst_db)))


def test_the_worst_of_several_ranks() -> None:
    nan = math.nan
    one = Figures(1.0, 0.0, 0.2, 30.0, nan, 0.5, 2.0, 0.0)
    two = Figures(3.0, 0.1, 0.1, 29.0, 12.0, nan, 4.0, 1.0)
    assert worst([one, two]) == worst([two, one]) == Figures(3.0, 0.1, 0.2, 29.0, 12.0, 0.5, 4.0, 1.0)
    assert worst([one, two]).worst_db == 12.0
    assert math.isnan(worst([one]).slice_sqnr) and one.worst_db == 30.0


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    counts=st.lists(st.integers(0, 5), min_size=1, max_size=5),
    columns=st.integers(1, 300),
    seed=st.integers(0, 10_000),
    chunk=st.sampled_from([1, 500, 1 << 20]),
    slices=st.booleans(),
)
def test_figures_of_each_expert_are_those_of_its_rows(
    kind: str, counts: list[int], columns: int, seed: int, chunk: int, slices: bool
) -> None:
    expert = torch.repeat_interleave(torch.tensor(counts))
    expert = expert[torch.randperm(len(expert), generator=torch.Generator().manual_seed(seed))]
    x = make(kind, max(1, len(expert)), columns, seed)[: len(expert)]
    q, s = quantize_activation(x, "pow2")
    whole, statistics._CHUNK = statistics._CHUNK, chunk
    try:
        ours = measure_each(x, q, s, expert, len(counts), slices)
    finally:
        statistics._CHUNK = whole
    assert ours.shape == (len(counts), 8) and ours.dtype == torch.float64
    for index, row in enumerate(ours.tolist()):
        at = expert == index
        assert_same(Figures.of(row), vars(found(x[at], q[at], s[at], slices=slices)) | {"at": {}})


def test_the_worst_of_the_matrices_of_a_block_and_which_they_are() -> None:
    nan = math.nan
    rows = torch.tensor(
        [
            [1.0, 0.0, 0.2, 30.0, nan, 0.5, 2.0, 0.0],
            [3.0, 0.1, 0.1, 29.0, 12.0, nan, 4.0, 1.0],
            [2.0, 0.0, 0.3, 31.0, 25.0, 0.1, 3.0, 0.0],
        ],
        dtype=torch.float64,
    )
    ours = Figures.of(worst_of(rows, [5, 7, 52]).tolist())
    assert ours == Figures(
        3.0, 0.1, 0.3, 29.0, 12.0, 0.1, 4.0, 1.0,
        {"amax": 7, "saturated": 7, "underflow": 52, "sqnr": 7, "slice_sqnr": 7, "scale_min": 52, "scale_max": 7, "nonfinite": 7},
    )  # fmt: skip
    assert (ours.worst_figure, ours.worst_db) == ("slice_sqnr", 12.0)
    other = Figures(9.0, 0.0, 0.0, 8.0, 13.0, nan, 5.0, 0.0, {"amax": 1, "sqnr": 2, "slice_sqnr": 3})
    both = worst([ours, other])
    assert both.at["amax"] == 1 and both.at["sqnr"] == 2 and both.at["slice_sqnr"] == 7 and both.at["scale_min"] == 52
    assert (both.worst_figure, both.worst_db) == ("sqnr", 8.0)
    unknown = Figures.of(worst_of(torch.full((2, 8), nan, dtype=torch.float64), [0, 1]).tolist())
    assert math.isnan(unknown.worst_db) and unknown.at == {}
