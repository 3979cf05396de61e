"""Replacements call the original in an unpatched process, even through a reference kept from before."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import pytest

from jetrl_patch import registry, session
from jetrl_patch.registry import Config, Patch
from jetrl_patch.session import while_active, while_config
from tests.patching.fakes import Fake

#: patched attributes whose replacement also runs in an unpatched process, or checks a setting itself
UNMARKED = {
    "WorkerWrap.update_weight": "an order of a patched trainer is an error there",
    "WorkerWrap.update_weight_cuda_ipc": "an order of a patched trainer is an error there",
    "vLLMColocateWorkerExtension.update_weights_from_ipc": "a patched trainer's settings are an error there",
    "AsyncLLM.generate": "notes versions only inside a marked execute",
    "FSDPEngine._build_fsdp_module": "asks for FP16",
    "FSDPEngine.optimizer_step": "asks for FP16",
    "DeepspeedStrategy.optimizer_step": "asks for FP16",
    "PolicyLoss.forward": "asks for a correction",
    "TrainingWorker.train_batch": "ends what a marked sync began",
    "CheckpointEngineManager.update_weights": "what it wraps in verl's auto_await, which has to stay outermost, is marked",
}


@while_active
def louder(original: Any) -> Any:
    def function(*args: Any) -> str:
        return str(original(*args)).upper()

    return function


@while_active
def louder_later(original: Any) -> Any:
    async def function() -> str:
        return str(await original()).upper()

    return function


def test_a_kept_reference_is_the_original_again_after_disable(use: Any, environment: Any) -> None:
    use(Fake([Patch(module="fakefw.a", attr="function", make=louder, reason="r", remove_when="w")]))
    session.enable()
    import fakefw.a  # type: ignore[import-not-found]

    kept = fakefw.a.function
    assert kept() == "A" and kept.__name__ == "function" and kept.__module__ == "fakefw.a"
    session.disable()
    assert fakefw.a.function is not kept and kept() == "a"


def test_a_coroutine_function_stays_one_and_asks_when_it_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    async def original() -> str:
        return "a"

    made = louder_later(original)
    assert inspect.iscoroutinefunction(made) and not inspect.iscoroutinefunction(louder(lambda: "a"))
    waiting = made()
    monkeypatch.setattr(session, "is_active", lambda: True)
    monkeypatch.setattr(session, "active_config", Config)
    assert asyncio.run(waiting) == "A"
    monkeypatch.setattr(session, "is_active", lambda: False)
    assert asyncio.run(made()) == "a"


def test_a_setting_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made = while_config(lambda config: config.exact)(louder)(lambda: "a")
    monkeypatch.setattr(session, "is_active", lambda: True)
    for config, expected in ((Config(), "A"), (Config(precision="bf16"), "a")):
        monkeypatch.setattr(session, "active_config", lambda config=config: config)
        assert made() == expected


@pytest.mark.parametrize("framework", ["ray", "verl", "openrlhf"])
def test_every_patch_of_a_trainer_is_marked_or_says_why_not(framework: str) -> None:
    patches = registry.resolve(framework).patches(Config(align="exact", optimizer_states="8bit"))
    unmarked = {patch.attr for patch in patches if not hasattr(patch.make, "__wrapped__")}
    assert unmarked <= set(UNMARKED), unmarked - set(UNMARKED)
