"""What adapters of training frameworks share: marks, reports, the guard's followers, settings that differ."""

from __future__ import annotations

import dataclasses
import gc
from types import SimpleNamespace
from typing import Any

import pytest

from jetrl_patch import session
from jetrl_patch.config import Config
from jetrl_patch.errors import ConflictError, NotPatchedError, differences
from jetrl_patch.sync.protocol import Terms
from jetrl_patch.sync.send import SyncStats
from jetrl_patch.trainer import rules, source
from jetrl_patch.trainer.audit import sync_metrics, sync_report
from jetrl_patch.trainer.source import Driver, Worker, reset

LINEAR, EXACT = Config(align="linear").resolved(), Config(align="exact").resolved()


def test_one_differing_setting_is_told_alone() -> None:
    with pytest.raises(ConflictError) as caught:
        rules.require_same("a vLLM worker", required=LINEAR.to_env(), found=EXACT.to_env())
    assert str(caught.value) == (
        "settings of a vLLM worker: required align='linear', found align='exact'. "
        "Give every process of the run the same settings."
    )
    rules.require_same("a vLLM worker", required=EXACT.to_env(), found=EXACT.to_env())


def test_a_mark_that_is_missing_and_a_variable_that_only_one_side_has() -> None:
    with pytest.raises(NotPatchedError, match="the driver is not patched"):
        rules.check(None, EXACT, "an actor", "the driver is not patched")
    rules.check(EXACT.to_env(), EXACT, "an actor", "")
    found = {name: value for name, value in EXACT.to_env().items() if name != "JETRL_ALIGN"}
    with pytest.raises(ConflictError, match="found no align"):
        rules.require_same("an actor", required=EXACT.to_env(), found=found)


def test_configs_that_differ_in_one_field_take_a_short_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_session", session.Session(EXACT, EXACT, [], {}, []))
    with pytest.raises(ConflictError, match="required align='linear', found align='exact'") as caught:
        session.require_active("the worker", LINEAR)
    assert len(str(caught.value)) < 300
    texts = [
        differences("x", required=dataclasses.asdict(EXACT), found=dataclasses.asdict(other), fix="choose one")
        for other in (EXACT.replace(sync_timeout=1.0), EXACT.replace(exclude=("mlp.*",)))
    ]
    assert texts[0] == "x: required sync_timeout=300.0, found sync_timeout=1.0. Choose one."
    assert texts[1] == "x: required exclude=(), found exclude=('mlp.*',). Choose one."


def test_layers_that_a_split_leaves_in_bf16_are_a_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "cut_layers" not in sync_report(SyncStats(), 0.0)
    monkeypatch.setattr(session, "_notes", session.Notes())
    session.register(cut=["layers.0.o_proj", "layers.1.o_proj", "layers.0.o_proj"])
    assert sync_metrics([{**sync_report(SyncStats(), 0.0), "monitor": {}}])["jetrl/cut_layers"] == 2


def test_metrics_are_the_first_ranks_and_the_slowest_ranks_seconds() -> None:
    stats = SyncStats()
    stats.total, stats.layers = 7, 2
    first = {**sync_report(stats, 0.0), "monitor": {"jetrl/scale/x": 1.0}, "loss_scale": 8.0}
    found = sync_metrics([first, {**first, "sync_seconds": first["sync_seconds"] + 1.0, "sync_bytes_total": 9}])
    assert found["jetrl/sync_seconds"] == first["sync_seconds"] + 1.0
    assert (found["jetrl/sync_bytes_total"], found["jetrl/quantized_layers"], found["jetrl/loss_scale"]) == (7, 2, 8.0)
    assert found["jetrl/scale/x"] == 1.0 and "jetrl/sync_calls" not in found and "jetrl/pid" not in found


def test_a_delta_sync_says_what_changed() -> None:
    stats = SyncStats(total=30, full=200, changed=8)
    found = sync_metrics([{**sync_report(stats, 0.0), "monitor": {}}])
    assert (found["jetrl/sync_bytes_full"], found["jetrl/sync_changed_fraction"]) == (200, 0.04)
    assert "jetrl/sync_bytes_full" not in sync_metrics([{**sync_report(SyncStats(total=30), 0.0), "monitor": {}}])


class Model:
    """The part of a ``Source`` that a follower has."""

    def __init__(self) -> None:
        self.moved = list[Any]()

    def to_bf16(self, names: list[str]) -> None:
        self.moved.append(names)


def test_followers_leave_fp8_with_the_policy_unless_they_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(source, "show", lambda monitor, weights, quantize: calls.append((list(weights), quantize)))
    smoother: Any = SimpleNamespace(observer=SimpleNamespace(agree=lambda: calls.append("agree")))
    guard: Any = SimpleNamespace(decides=True, begin=lambda: ["a"])
    policy = source.Source(layers=[], modules={}, shapes={}, terms=Terms.of(LINEAR, "torch"), smoother=smoother, monitor=guard)
    reference, gone, followers = Model(), Model(), Worker().followers
    for model in (reference, gone):
        followers.add(model)  # type: ignore[arg-type]
    del model, gone
    gc.collect()
    policy.begin_sync(list, followers, quantizes=False)
    assert calls == ["agree", ([], None)] and reference.moved == [["a"]]


def test_figures_are_handed_out_once_and_a_reset_is_a_fresh_start() -> None:
    driver, worker = Driver(metrics={"a": 1}), Worker()
    assert driver.take() == {"a": 1} and driver.take() == {}
    driver.metrics["b"], before = 2, worker.followers
    reset(driver, worker)
    assert driver.metrics == {} and worker.followers is not before
