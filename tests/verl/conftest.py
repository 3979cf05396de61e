"""Fixtures of verl's driver."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from jetrl_patch import session
from jetrl_patch.adapters.verl import state
from jetrl_patch.config import Config


@pytest.fixture
def exact_driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A driver in exact mode, with clean state before and after."""
    monkeypatch.setattr(session, "is_active", lambda: True)
    monkeypatch.setattr(session, "active_config", lambda: Config().resolved())
    state.reset()
    yield
    state.reset()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """``base(*overrides)``: verl's configuration for a small dense model."""
    from tests.models import config_of
    from tests.verl.composed import composer

    path, rollout = tmp_path_factory.mktemp("model"), "actor_rollout_ref.rollout"
    config_of("qwen3").save_pretrained(path)
    own = [
        f"{rollout}.name=vllm", f"{rollout}.tensor_model_parallel_size=1", f"actor_rollout_ref.model.path={path}",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    ]  # fmt: skip
    with composer(own) as make:
        yield make
