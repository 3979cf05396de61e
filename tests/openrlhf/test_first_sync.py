"""The sync when OpenRLHF's trainer is built: engines that sleep are woken for it, and sleep again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from jetrl_patch.adapters.openrlhf import sync
from jetrl_patch.config import Config


@pytest.mark.parametrize(
    ("precision", "sleeps", "wanted"),
    [
        ("fp8-unified", True, [("wake_up", {"tags": ["weights"]}), "sync", ("sleep", {})]),
        ("fp8-unified", False, ["sync"]),
        ("bf16", True, []),
    ],
)
def test_the_calls_in_their_order(monkeypatch: pytest.MonkeyPatch, precision: Any, sleeps: bool, wanted: list[Any]) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(sync, "_on_engines", lambda trainer, method, **words: calls.append((method, words)))
    monkeypatch.setattr(sync.session, "active_config", lambda: Config(precision=precision))
    trainer = SimpleNamespace(
        vllm_engines=["an engine"],
        args=SimpleNamespace(vllm=SimpleNamespace(enable_sleep=sleeps)),
        broadcast_to_vllm=lambda: calls.append("sync"),
    )
    sync.trainer_init(lambda self: None)(trainer)
    assert calls == wanted
