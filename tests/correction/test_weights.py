"""Every correction against its scalar definition."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jetrl_patch.config.corrections import CORRECTIONS as RECORDS
from jetrl_patch.config.corrections import KINDS, interval
from jetrl_patch.measure.corrections import correct, ratio, seq_ratio
from jetrl_patch.measure.mismatch import Applied, applied, merge
from tests.correction.batches import batches, by_hand

CORRECTIONS = [kind for kind in KINDS if kind != "none"]
BOUNDS = st.tuples(st.floats(0.01, 0.999), st.floats(1.001, 20.0))


def given_bounds(kind: str, bounds: tuple[float, float]) -> tuple[float, ...]:
    return bounds if kind in ("geo-mis", "icepop") else bounds[1:]


def test_without_a_correction_every_response_token_counts_once() -> None:
    log_ratio, mask = torch.tensor([[0.5, float("nan"), -3.0]]), torch.tensor([[2, 0, 1]])
    found = correct("none", log_ratio, mask)
    assert found.kept.dtype == torch.bool and found.kept.tolist() == [[True, False, True]]
    assert found.weights.tolist() == [[1.0, 0.0, 1.0]] and not found.outside.any()


@pytest.mark.parametrize("kind", CORRECTIONS)
@given(batch=batches(), bounds=BOUNDS | st.none())
def test_weights_are_those_of_the_definition(kind: str, batch: Any, bounds: Any) -> None:
    log_ratio, mask = batch
    own = None if bounds is None else given_bounds(kind, bounds)
    low, high = interval(kind, own)
    found = correct(kind, log_ratio, mask, own)
    expected = torch.tensor(by_hand(kind, log_ratio, mask, low, high), dtype=torch.float64)
    assert found.weights.dtype == torch.float32 and not found.weights.requires_grad
    torch.testing.assert_close(found.weights.double(), expected, rtol=1e-6, atol=1e-37)
    dropped = (expected == 0) & mask.bool() & (kind not in ("tis", "seq-tis"))
    assert torch.equal(found.kept, mask.bool() & ~dropped)
    assert torch.isfinite(found.weights).all() and not found.weights[mask == 0].any()


@pytest.mark.parametrize("kind", KINDS)
@given(batch=batches(st.just(0.0)))
def test_agreement_to_the_last_bit_is_the_identity(kind: str, batch: Any) -> None:
    log_ratio, mask = batch
    found = correct(kind, log_ratio, mask)
    assert torch.equal(found.weights, mask.float())
    assert torch.equal(found.kept, mask.bool()) and not found.outside.any()


@pytest.mark.parametrize("kind", CORRECTIONS)
def test_bounds_are_closed(kind: str) -> None:
    """With bounds of 1, the narrowest, exact mode sits on them, and every correction is the identity."""
    mask = torch.tensor([[1, 1, 0], [0, 1, 1]])
    found = correct(kind, torch.zeros(2, 3), mask, given_bounds(kind, (1.0, 1.0)))
    assert torch.equal(found.weights, mask.float()) and torch.equal(found.kept, mask.bool()) and not found.outside.any()


@pytest.mark.parametrize("kind", CORRECTIONS)
def test_a_nan_at_a_token_is_seen_and_one_at_padding_is_not(kind: str) -> None:
    log_ratio = torch.tensor([[0.0, math.nan], [0.0, math.nan]])
    found = correct(kind, log_ratio, torch.tensor([[1, 0], [1, 1]])).weights
    assert found[0].tolist() == [1.0, 0.0] and found[1, 1].isnan()
    assert math.isnan(applied(kind, log_ratio, torch.ones(2, 2)).as_metrics()["jetrl/correction_weight_mean"])


def test_no_gradient_goes_through_a_weight() -> None:
    log_ratio = torch.zeros(2, 3, requires_grad=True)
    assert not any(correct(kind, log_ratio, torch.ones(2, 3)).weights.requires_grad for kind in CORRECTIONS)


@given(batch=batches())
def test_plain_ratios(batch: Any) -> None:
    log_ratio, mask = batch
    for found, kind in ((ratio(log_ratio, mask), "mis"), (seq_ratio(log_ratio, mask), "seq-mis")):
        top = torch.finfo(torch.float32).max
        expected = [[min(w, top) for w in row] for row in by_hand(kind, log_ratio, mask, 0.0, math.inf)]
        torch.testing.assert_close(found.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=1e-37)


def test_what_fits_no_correction_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must both be \[B, T\], found \(2, 3\) and \(2, 4\)"):
        correct("tis", torch.zeros(2, 3), torch.ones(2, 4))
    with pytest.raises(ValueError, match=r"must both be \[B, T\]"):
        correct("tis", torch.zeros(3), torch.ones(3))
    with pytest.raises(KeyError):
        correct("sis", torch.zeros(2, 3), torch.ones(2, 3))


def test_defaults_come_from_the_papers() -> None:
    assert {kind: found.default for kind, found in RECORDS.items()} == {
        "tis": (2.0,), "seq-tis": (3.0,), "mis": (2.0,), "seq-mis": (3.0,), "geo-mis": (0.999, 1.001),
        "icepop": (0.5, 5.0),
    }  # fmt: skip


@pytest.mark.parametrize("kind", CORRECTIONS)
@given(batch=batches(), bounds=BOUNDS)
def test_figures_are_those_of_the_weights(kind: str, batch: Any, bounds: Any) -> None:
    log_ratio, mask = batch
    own = given_bounds(kind, bounds)
    low, high = interval(kind, own)
    found = applied(kind, log_ratio, mask, own).as_metrics()
    rows = by_hand(kind, log_ratio, mask, low, high)
    tokens = [w for row, marks in zip(rows, mask.tolist()) for w, mark in zip(row, marks) if mark]
    if not tokens:
        assert all(math.isnan(value) for value in found.values())
        return
    units = tokens
    if RECORDS[kind].weighs_sequences:
        units = [max(row) for row, marks in zip(rows, mask.tolist()) if any(marks)]
    square = sum(w * w for w in units)
    assert found["jetrl/ess"] == pytest.approx(sum(units) ** 2 / (len(units) * square) if square else 0.0, rel=1e-6)
    assert found["jetrl/correction_weight_min"] == pytest.approx(min(tokens), rel=1e-6)
    assert found["jetrl/correction_weight_max"] == pytest.approx(max(tokens), rel=1e-6)
    assert found["jetrl/correction_weight_mean"] == pytest.approx(sum(tokens) / len(tokens), rel=1e-6)
    truncates = kind in ("tis", "seq-tis")
    dropped = 0.0 if truncates else tokens.count(0.0) / len(tokens)
    assert found["jetrl/masked_fraction"] == pytest.approx(dropped)
    plain = by_hand("seq-mis" if kind == "seq-tis" else "mis", log_ratio, mask, 0.0, math.inf)
    capped = [r > high for row, marks in zip(plain, mask.tolist()) for r, mark in zip(row, marks) if mark]
    expected = sum(capped) / len(capped) if truncates else dropped
    assert found["jetrl/clipped_fraction"] == pytest.approx(expected)
    parts = [applied(kind, log_ratio[i : i + 1], mask[i : i + 1], own) for i in range(len(mask))]
    assert merge(Applied, parts).as_metrics() == pytest.approx(found, rel=1e-9)
