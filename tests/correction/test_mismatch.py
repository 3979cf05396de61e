"""Mismatch figures on cases that can be computed by hand."""

import math

import pytest
import torch

from jetrl_patch.measure.mismatch import Sums, merge, mismatch, sums

LOG2 = math.log(2.0)


def test_equal_log_probs_are_zero_apart():
    logp = -torch.rand(4, 7)
    found = mismatch(logp, logp.clone(), torch.ones(4, 7))
    assert found.tokens == 28 and found.bit_equal_fraction == 1.0
    assert found.logp_abs_diff_mean == found.logp_abs_diff_max == found.k1_kl == found.k3_kl == 0.0
    assert found.ratio_min == found.ratio_max == found.ess == 1.0


def test_figures_by_hand():
    rollout = torch.tensor([[-1.0, -2.0, -3.0, -9.0]])
    trainer = rollout + torch.tensor([[0.0, LOG2, -LOG2, 5.0]])
    found = mismatch(trainer, rollout, torch.tensor([[1, 1, 1, 0]]))
    assert found.tokens == 3 and found.bit_equal_fraction == pytest.approx(1 / 3)
    assert found.logp_abs_diff_mean == pytest.approx(2 * LOG2 / 3, rel=1e-6)
    assert found.logp_abs_diff_max == pytest.approx(LOG2, rel=1e-6)
    assert found.k1_kl == pytest.approx(0.0, abs=1e-6)
    assert found.k3_kl == pytest.approx((2 - 1 - LOG2 + 0.5 - 1 + LOG2) / 3, rel=1e-6)
    assert (found.ratio_min, found.ratio_max) == pytest.approx((0.5, 2.0), rel=1e-6)
    assert found.ess == pytest.approx(3.5**2 / (3 * (1 + 4 + 0.25)), rel=1e-6)


def test_one_bit_is_seen():
    logp = torch.full((1, 100), -0.7)
    other = logp.clone()
    other[0, 3] = torch.nextafter(logp[0, 3], torch.tensor(0.0))
    found = mismatch(other, logp, torch.ones(1, 100))
    assert found.bit_equal_fraction == 0.99 and 0 < found.logp_abs_diff_max < 1e-6


def test_nan_stays_visible_and_masked_nan_does_not():
    rollout = torch.tensor([-1.0, -1.0])
    trainer = torch.tensor([-1.0, float("nan")])
    assert math.isnan(mismatch(trainer, rollout, torch.ones(2)).logp_abs_diff_mean)
    assert mismatch(trainer, rollout, torch.tensor([1, 0])).bit_equal_fraction == 1.0


@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf])
def test_only_finite_values_are_equal(value):
    logp = torch.tensor([-1.0, value])
    assert mismatch(logp, logp.clone(), torch.ones(2)).bit_equal_fraction == 0.5
    assert mismatch(logp, logp.clone(), torch.tensor([1, 0])).bit_equal_fraction == 1.0


def test_no_tokens():
    found = mismatch(torch.zeros(2), torch.zeros(2), torch.zeros(2))
    assert found.tokens == 0 and math.isnan(found.bit_equal_fraction)


def test_shapes_must_agree():
    with pytest.raises(ValueError, match=r"trainer \(2,\), rollout \(3,\)"):
        mismatch(torch.zeros(2), torch.zeros(3), torch.zeros(2))


def test_metric_names():
    names = set(mismatch(torch.zeros(1), torch.zeros(1), torch.ones(1)).as_metrics())
    assert names == {
        "jetrl/tokens", "jetrl/logp_abs_diff_mean", "jetrl/logp_abs_diff_max", "jetrl/bit_equal_fraction",
        "jetrl/k1_kl", "jetrl/k3_kl", "jetrl/ratio_min", "jetrl/ratio_max", "jetrl/ess",
    }  # fmt: skip


def test_parts_put_together_are_the_whole():
    rollout, trainer = -torch.rand(6, 9), -torch.rand(6, 9)
    mask = torch.rand(6, 9) < 0.6
    mask[2:4] = False  # a part without a token
    mask[5, 0] = True
    whole = mismatch(trainer, rollout, mask).as_metrics()
    parts = [sums(trainer[i : i + 2], rollout[i : i + 2], mask[i : i + 2]) for i in (0, 2, 4)]
    assert merge(Sums, parts).figures().as_metrics() == pytest.approx(whole, rel=1e-12)
    assert math.isnan(merge(Sums, []).figures().ess)
    trainer[5, mask[5].nonzero()[0]] = float("nan")
    parts[2] = sums(trainer[4:], rollout[4:], mask[4:])
    broken = merge(Sums, parts).figures()
    assert math.isnan(broken.logp_abs_diff_mean) and math.isnan(broken.logp_abs_diff_max)
