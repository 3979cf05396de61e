"""Samples of an asynchronous run: which weights made them, and what exact mode promises about them."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from jetrl_patch import session
from jetrl_patch.adapters.verl import metrics, state, sync, transport
from jetrl_patch.adapters.verl.state import DRIVER, WORKER, report_key
from jetrl_patch.config import Config
from jetrl_patch.errors import AuditError, NotPatchedError
from jetrl_patch.measure.mismatch import mismatch
from tests.verl.test_metrics import REPORT

pytestmark = pytest.mark.usefixtures("exact_driver")
CONFIG = OmegaConf.create({"algorithm": {}})


def column(*values: object) -> np.ndarray:
    return np.array(values, dtype=object)


def test_a_sample_is_current_if_the_last_sync_alone_made_it():
    DRIVER.version = 4
    made = [(4, 4), (3, 4), (4, 5), (3, 3)]
    assert state.are_current(made, unknown=True).tolist() == [True, False, False, False]
    assert state.are_current([(None, 4), (4, None)], unknown=True).tolist() == [True, True]
    assert state.are_current([(None, 4), (4, None)], unknown=False).tolist() == [False, False]


def test_both_trainers_say_what_made_a_sample():
    DRIVER.version = 7
    both = {"min_global_steps": column(1, 2), "max_global_steps": column(2, 2)}
    for named, made in ((both, [(1, 2), (2, 2)]), ({}, [(None, None)] * 2)):
        assert state.of_batch(SimpleNamespace(non_tensor_batch=named, batch={"response_mask": torch.ones(2, 3)})) == made
    tags = [{"min_global_steps": 3, "max_global_steps": 4}, {"is_padding": True, "min_global_steps": 3}, {}]
    assert state.of_tags(tags) == [(3, 4), (7, 7), (None, None)]


def test_only_tokens_of_the_current_weights_are_held_to_equality(caplog):
    logp = -torch.rand(3, 4)
    other = logp.clone()
    other[2] += 0.5
    mask = torch.ones(3, 4)
    mask[0, 2:] = 0
    metrics.note_mismatch(CONFIG, other, logp, mask, torch.tensor([True, True, False]))
    found = DRIVER.metrics
    assert found["jetrl/stale_fraction"] == pytest.approx(4 / 10) and found["jetrl/bit_equal_fraction_current"] == 1.0
    assert found["jetrl/bit_equal_fraction"] == pytest.approx(6 / 10) and not caplog.text
    with pytest.raises(AuditError, match=r"response token 0 of sample 2: .*\(4 of 10 tokens differ, in 1 of 3 samples\)"):
        metrics.note_mismatch(CONFIG, other, logp, mask, torch.tensor([True, True, True]))  # a second batch of the step
    assert DRIVER.metrics["jetrl/tokens"] == 20 and DRIVER.metrics["jetrl/stale_fraction"] == pytest.approx(4 / 20)
    assert DRIVER.metrics["jetrl/bit_equal_fraction_current"] == pytest.approx(12 / 16)


def test_a_step_without_current_samples_promises_nothing(caplog):
    logp = -torch.rand(2, 3)
    metrics.note_mismatch(CONFIG, logp + 1, logp, torch.ones(2, 3), torch.zeros(2, dtype=torch.bool))
    assert DRIVER.metrics["jetrl/stale_fraction"] == 1.0
    assert "jetrl/bit_equal_fraction_current" not in DRIVER.metrics and not caplog.text


def test_the_line_of_a_step_ends_its_comparison():
    logp = -torch.rand(2, 3)
    write = metrics.log(lambda self, data, step, backend: None)
    for _ in range(2):
        metrics.note_mismatch(CONFIG, logp, logp, torch.ones(2, 3), torch.ones(2, dtype=torch.bool))
        assert DRIVER.metrics["jetrl/tokens"] == 6
        write(None, {"training/global_step": 1}, 1)


def test_the_reports_of_all_ranks_survive_the_merge():
    merged = {report_key(1): {"b": 1}, "verl/metric": 2.0, report_key(0): {"a": 1}}
    results, others = metrics.split_reports(merged, 2)
    assert results == [{report_key(0): {"a": 1}}, {report_key(1): {"b": 1}}] and others == {"verl/metric": 2.0}
    results, _ = metrics.split_reports({report_key(1): {}}, 2)
    with pytest.raises(NotPatchedError, match=r"training workers \[0\]"):
        metrics.note_sync(results)


def test_over_a_checkpoint_engine_a_broken_stream_ends_early():
    def stream():
        yield "a", torch.zeros(1)
        raise RuntimeError("NaN in b")

    WORKER.separate = True
    assert [name for name, _ in sync.until_broken(stream())] == ["a"]
    assert str(WORKER.broken) == "NaN in b"
    WORKER.separate = False
    with pytest.raises(RuntimeError, match="NaN in b"):
        list(sync.until_broken(stream()))


def test_what_a_checkpoint_engine_receives_is_passed_on():
    async def received():
        for i in range(3):
            yield str(i), torch.full((2,), i)

    async def collect():
        return [name async for name, _ in transport.ending_early(received(), None)]

    assert asyncio.run(collect()) == ["0", "1", "2"]


@pytest.mark.parametrize(("current", "stale"), [([True, True], 0.0), ([True, False], 0.75), ([False, False], 1.0)])
def test_losses_promise_nothing_for_a_step_with_older_samples(current, stale, monkeypatch, caplog):
    logp = -torch.rand(2, 3)
    found = mismatch(logp + 1, logp, torch.ones(2, 3))
    DRIVER.current.append((torch.tensor(current), [1, 3]))
    expected = r"log-probs of a step: required equal ones on both sides, found 0\.0000 of 6 bit-equal, mean .dlogp. 1"
    with pytest.raises(AuditError, match=expected) if stale == 0.0 else contextlib.nullcontext():
        metrics.note(found, {})
    assert DRIVER.metrics["jetrl/stale_fraction"] == stale and DRIVER.current == []
    assert ("jetrl/bit_equal_fraction_current" in DRIVER.metrics) == (stale == 0.0) and not caplog.text
    monkeypatch.setattr(session, "active_config", lambda: Config(on_mismatch="recompute").resolved())
    DRIVER.current.append((torch.tensor(current), [1, 3]))
    metrics.note(found, {})
    assert ("exact mode is not exact" in caplog.text) == (stale == 0.0)


@pytest.mark.parametrize(
    ("changes", "synchronous"),
    [
        ({}, True),
        ({"trainer": {"v1": {"trainer_mode": "sync"}}, "actor_rollout_ref": {"hybrid_engine": True}}, True),
        ({"trainer": {"v1": {"trainer_mode": "colocate_async"}}}, False),
        ({"trainer": {"v1": {"trainer_mode": "separate_async"}}}, False),
        ({"actor_rollout_ref": {"hybrid_engine": False}}, False),  # the asynchronous programs of V0
    ],
)
def test_a_sample_without_versions_is_held_to_equality_only_where_all_are_of_one(changes, synchronous):
    DRIVER.version = 4
    config = OmegaConf.create({"algorithm": {}, **changes})
    assert state.are_of_one(config) is synchronous
    logp, mask = -torch.rand(2, 3), torch.ones(2, 3)
    result = (SimpleNamespace(batch={"old_log_probs": logp + 1}), 0.0)
    compute = metrics.v0_old_log_prob(lambda self, batch: result)
    batch = SimpleNamespace(non_tensor_batch={}, batch={"response_mask": mask, "rollout_log_probs": logp})
    with pytest.raises(AuditError) if synchronous else contextlib.nullcontext():
        compute(SimpleNamespace(config=config), batch)
    assert DRIVER.metrics["jetrl/stale_fraction"] == (0.0 if synchronous else 1.0)


def test_a_sync_can_be_awaited_and_called(monkeypatch):
    """verl's trainers do both, and its decorator looks at the caller's frame."""
    from verl.utils.ray_utils import auto_await

    async def original(self, global_steps=None):
        return {report_key(0): REPORT, "verl/metric": global_steps}

    update = metrics.manager_update_weights(auto_await(original))
    manager = SimpleNamespace(backend="nccl", actor_wg=SimpleNamespace(world_size=1))

    async def trainer():
        return await update(manager, global_steps=3)

    assert update(manager, global_steps=2) == {"verl/metric": 2} and DRIVER.version == 2
    assert asyncio.run(trainer()) == {"verl/metric": 3} and DRIVER.version == 3
