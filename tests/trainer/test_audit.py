"""The rollout's log-probs as a step's old ones: what is compared, what a difference does, what the log gets."""

from __future__ import annotations

import itertools

import pytest
import torch

from jetrl_patch.config import Config
from jetrl_patch.errors import AuditError
from jetrl_patch.measure.mismatch import mismatch
from jetrl_patch.trainer.audit import Audit, hold, sample

STOP = Config(old_log_probs="rollout")
GO_ON = STOP.replace(on_mismatch="recompute")


@pytest.fixture
def batch():
    """Log-probs [3, 5] of both sides, equal, and a mask with tokens that do not count."""
    generator = torch.Generator().manual_seed(5)
    trainer = -torch.rand(3, 5, generator=generator)
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 1, 1, 1, 0], [1, 1, 1, 1, 1]])
    return trainer, torch.where(mask.bool(), trainer, torch.zeros(())), mask


def one_ulp_off(values, row, position):
    changed = values.clone()
    changed.view(torch.int32)[row, position] += 1
    return changed


@pytest.mark.parametrize("config", [STOP, GO_ON])
def test_equal_bits_pass_whatever_stands_where_nothing_counts(batch, config):
    audit = Audit()
    assert audit.compare(*batch, config)
    found, metrics = audit.merged([{"audit": Audit().report()}])
    assert (found.tokens, found.bit_equal_fraction, found.logp_abs_diff_max) == (11, 1.0, 0.0)
    assert metrics == {"jetrl/audited_tokens": 11.0} and not audit.failed and audit.take() is None


@pytest.mark.parametrize(("row", "position", "number", "name"), [(1, 2, 1, "sample 1"), (2, 4, 4, "prompt 7")])
def test_one_ulp_stops_the_run_with_the_token_and_both_values(batch, row, position, number, name):
    trainer, rollout, mask = batch
    changed = one_ulp_off(trainer, row, position)
    names = ["prompt 3", "prompt 5", "prompt 7"] if name.startswith("prompt") else []
    with pytest.raises(AuditError) as error:
        Audit().compare(changed, rollout, mask, STOP, names)
    text = str(error.value)
    assert text.startswith(f"log-prob of response token {number} of {name}: required the rollout's ")
    assert f"{rollout[row, position].item():.9g}" in text and f"{changed[row, position].item():.9g} in the trainer" in text
    assert "(1 of 11 tokens differ, in 1 of 3 samples)" in text and len(text) < 320


def test_one_ulp_where_nothing_counts_is_no_difference(batch):
    trainer, rollout, mask = batch
    assert Audit().compare(one_ulp_off(trainer, 0, 4), rollout, mask, STOP)


def test_a_difference_can_be_logged_instead(batch, caplog):
    trainer, rollout, mask = batch
    audit = Audit()
    changed = one_ulp_off(trainer, 0, 1)
    assert not audit.compare(changed, rollout, mask, GO_ON) and audit.failed
    assert "response token 1 of sample 0" in caplog.text and caplog.records[0].levelname == "ERROR"
    assert audit.compare(trainer, rollout, mask, GO_ON) and audit.failed  # for the rest of the run
    found, _ = audit.merged([{"audit": Audit().report()}])
    assert audit.failed  # whatever the other processes found
    expected = mismatch(torch.cat([changed, trainer]), torch.cat([rollout] * 2), torch.cat([mask] * 2))
    assert found == expected and found.bit_equal_fraction == 21 / 22


def test_only_samples_of_the_current_weights_must_be_equal(batch):
    """Of an asynchronous run the others may differ."""
    trainer, rollout, mask = batch
    changed = one_ulp_off(trainer, 1, 2)
    hold(changed, rollout, mask, torch.tensor([True, False, True]), STOP)
    for current in ([True, True, True], [False, True, False]):
        with pytest.raises(AuditError, match="sample 1: required the rollout's"):
            hold(changed, rollout, mask, torch.tensor(current), STOP)
    hold(changed, rollout, mask, torch.tensor([True] * 3), STOP.replace(align="linear", old_log_probs="recompute"))


def test_nan_is_a_difference(batch):
    trainer, rollout, mask = batch
    trainer = trainer.clone()
    trainer[2, 0] = float("nan")
    with pytest.raises(AuditError, match="found nan in the trainer"):
        Audit().compare(trainer, rollout, mask, STOP)


@pytest.mark.parametrize(("value", "word"), [(float("nan"), "nan"), (-float("inf"), "-inf")])
def test_a_value_that_is_not_finite_is_a_difference_though_both_sides_have_its_bits(batch, value, word):
    trainer, rollout, mask = (values.clone() for values in batch)
    trainer[2, 1] = rollout[2, 1] = value
    expected = rf"token 1 of sample 2: required a finite number, found {word} in the rollout and {word} in the trainer \(1 of 11"
    with pytest.raises(AuditError, match=expected):
        Audit().compare(trainer, rollout, mask, STOP)
    trainer[2, 1] = rollout[2, 1] = -1.0
    trainer[0, 4] = rollout[0, 4] = value  # where nothing counts
    assert Audit().compare(trainer, rollout, mask, STOP)


def test_nothing_compared_is_nothing_logged():
    assert Audit().merged([{"audit": Audit().report()}]) is None and Audit().merged([]) is None


@pytest.mark.parametrize("multiple", [1, 2, 3])
@pytest.mark.parametrize("fraction", [0.0, 1e-9, 1 / 16, 0.3, 1.0])
@pytest.mark.parametrize("count", [0, 6, 12, 48])
def test_the_sample_is_spread_over_the_batch(count, fraction, multiple):
    found = sample(count, fraction, multiple)
    assert len(found) == len(set(found)) and found == sorted(found) and all(0 <= i < count for i in found)
    if found:
        gaps = [after - before for before, after in itertools.pairwise([*found, count])]
        assert found[0] == 0 and max(gaps) - min(gaps) <= 1
    assert len(found) % multiple == 0 and len(found) >= fraction * count
    assert len(found) < fraction * count + multiple or not fraction
