"""Weight versions: what sets them, what a sample records, what the metrics count, and a stale engine."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace

import pytest
import torch

from jetrl_patch import session
from jetrl_patch.adapters.openrlhf import metrics, state
from jetrl_patch.config import Config
from jetrl_patch.errors import AuditError, ConflictError, SyncError
from jetrl_patch.sync.delta import held_by
from jetrl_patch.sync.orders import encode
from jetrl_patch.trainer.ranks import require_same_workers

EXACT = Config(precision="fp8-unified").resolved()


@pytest.fixture(autouse=True)
def enabled(monkeypatch):
    monkeypatch.setattr(session, "is_active", lambda: True)
    monkeypatch.setattr(session, "active_config", lambda: EXACT)
    state.reset()
    yield
    state.reset()


async def _rpc(self, method, timeout, args, kwargs):
    return [method]


rpc = metrics.collective_rpc(_rpc)


@metrics.generate
async def generate(self, outputs):
    for output in outputs:
        await asyncio.sleep(0)
        if output == "sync":
            await rpc(None, "update_weight", None, (encode("end", version=state.ENGINE.version + 1), None, (0,)))
        else:
            yield SimpleNamespace(outputs=[])


@metrics.execute
async def execute(self, turns, logs):
    for outputs in turns:
        async for _ in generate(None, outputs):
            pass
    return {"extra_logs": logs}


def sample(*turns, logs=None):
    return asyncio.run(execute(None, turns, logs))["extra_logs"]


def test_only_the_end_of_a_sync_makes_a_version():
    for order in ("begin", "bucket", "status"):
        asyncio.run(rpc(None, "update_weight", None, (encode(order, version=5),), None))
    asyncio.run(rpc(None, "sleep", None, (), None))
    assert state.ENGINE.version == 0
    asyncio.run(rpc(None, "update_weight", None, (encode("end", version=5),), None))
    assert state.ENGINE.version == 5


def test_a_sample_carries_the_versions_of_its_first_and_last_token():
    assert sample(["a", "b"], logs={"x": 1}) == {"x": 1}  # never synced: no version to record
    state.ENGINE.version = 3
    assert sample(["a", "b"], logs={"x": 1}) == {"x": 1, metrics.FIRST: 3, metrics.LAST: 3}
    assert sample(["a", "sync", "b"]) == {metrics.FIRST: 3, metrics.LAST: 4}
    assert sample(["a"], ["sync", "b"], ["c"]) == {metrics.FIRST: 4, metrics.LAST: 5}


def test_samples_made_at_the_same_time_do_not_mix():
    async def both():
        state.ENGINE.version = 1
        early = asyncio.create_task(execute(None, [["a"]], None))
        slow = asyncio.create_task(execute(None, [["a", "b", "sync", "c"]], None))
        return await early, await slow

    early, slow = asyncio.run(both())
    assert early["extra_logs"] == {metrics.FIRST: 1, metrics.LAST: 1}
    assert slow["extra_logs"] == {metrics.FIRST: 1, metrics.LAST: 2}


def experience(first, last, rollout):
    return SimpleNamespace(
        prompts=["2 + 2"], action_log_probs=torch.tensor([[-1.0, -2.0]]), rollout_log_probs=torch.tensor([rollout]),
        action_mask=torch.ones(1, 2), info={metrics.FIRST: torch.tensor([first]), metrics.LAST: torch.tensor([last])},
    )  # fmt: skip


def noted(*experiences, asynchronous=True):
    advantage = SimpleNamespace(
        is_correction_level="off", is_correction_gating="ratio", is_correction_threshold=[0.5, 5.0]
    )
    args = SimpleNamespace(algo=SimpleNamespace(advantage=advantage), train=SimpleNamespace(async_enable=asynchronous))
    metrics.note_mismatch(experiences, args)
    return state.DRIVER.metrics


def test_exactness_is_judged_by_samples_of_the_weights_in_force(monkeypatch, caplog):
    state.DRIVER.version = 2
    found = noted(experience(2, 2, [-1.0, -2.0]), experience(1, 1, [-1.1, -2.0]), experience(1, 2, [-1.0, -2.5]))
    assert found["jetrl/bit_equal_fraction"] == pytest.approx(4 / 6)
    assert found["jetrl/stale_fraction"] == pytest.approx(2 / 3) and found["jetrl/bit_equal_fraction_current"] == 1.0
    assert not caplog.records
    said = r"response token 1 of a sample of prompt '2 \+ 2': .*\(1 of 2 tokens differ, in 1 of 1 samples\)"
    with pytest.raises(AuditError, match=said):
        noted(experience(2, 2, [-1.0, -2.5]))
    monkeypatch.setattr(session, "active_config", lambda: EXACT.replace(on_mismatch="recompute"))
    assert noted(experience(2, 2, [-1.0, -2.5]))["jetrl/bit_equal_fraction_current"] == 0.5
    assert "exact mode is not exact" in caplog.text


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_sample_without_versions_is_held_to_equality_only_in_a_synchronous_run(asynchronous):
    unknown = experience(1, 1, [-1.0, -2.5])
    unknown.info = {}
    with contextlib.nullcontext() if asynchronous else pytest.raises(AuditError):
        noted(unknown, asynchronous=asynchronous)
    assert state.DRIVER.metrics["jetrl/stale_fraction"] == float(asynchronous)


def test_only_stale_samples_are_no_error(caplog):
    state.DRIVER.version = 2
    found = noted(experience(1, 1, [-1.5, -2.5]))
    assert found["jetrl/stale_fraction"] == 1.0 and "jetrl/bit_equal_fraction_current" not in found
    assert not caplog.records


@pytest.mark.parametrize(("held", "common"), [("aa", "a"), ("ab", ""), ("a", "a")])
def test_a_delta_needs_engines_that_hold_the_same(held, common):
    assert held_by([[{"held": one}] for one in held]) == common


def test_a_stale_engine_stops_the_sync_and_is_named():
    answer = {"pid": 7, "node": "n1", "config": EXACT.to_env(), "version": 0, "serves": True}
    require_same_workers([answer], EXACT, 0)
    require_same_workers([answer], EXACT, None)  # a server that another run has used
    with pytest.raises(
        SyncError, match=r"pid 7 on n1\) is stale: it serves the weights of sync 0, but the last sync was 3"
    ):
        require_same_workers([{**answer, "version": 3}, answer], EXACT, 3)
    require_same_workers([{**answer, "serves": False}], EXACT, 3)  # after a failed sync it has sampled nothing
    with pytest.raises(ConflictError, match="settings of a vLLM worker"):
        require_same_workers([{**answer, "config": {}}], EXACT, 0)
