"""Replacements call the original in an unpatched process, even through a reference kept from before."""

from __future__ import annotations

import asyncio
import inspect
import types
from typing import Any

from jetrl_patch import session
from jetrl_patch.patching.patch import gated, replacement
from jetrl_patch.registry import Patch
from tests.patching.fakes import Fake


def louder(original: Any) -> Any:
    def function(*args: Any) -> str:
        return str(original(*args)).upper()

    return function


def patch(**more: Any) -> Patch:
    return Patch(module="fakefw.a", attr="function", make=louder, reason="r", remove_when="w", **more)


def test_a_kept_reference_is_the_original_again_after_disable(use: Any, environment: Any) -> None:
    use(Fake([patch()]))
    session.enable()
    import fakefw.a  # type: ignore[import-not-found]

    kept = fakefw.a.function
    assert kept() == "A" and kept.__name__ == "function" and kept.__module__ == "fakefw.a"
    session.disable()
    assert fakefw.a.function is not kept and kept() == "a"


def test_a_replacement_that_must_always_run_does(use: Any, environment: Any) -> None:
    use(Fake([patch(always="it refuses what a patched process sends")]))
    session.enable()
    import fakefw.a

    kept = fakefw.a.function
    session.disable()
    assert kept() == "A"


def test_a_replacement_runs_under_its_settings_alone(use: Any, environment: Any) -> None:
    use(Fake([patch(when=lambda config: config.exact)]))
    session.enable(precision="fp8-unified", align="exact")
    import fakefw.a

    kept = fakefw.a.function
    assert kept() == "A"
    session.disable()
    session.enable(precision="bf16")
    assert kept() == "a" and fakefw.a.function() == "a"


def test_a_coroutine_function_stays_one_and_asks_when_it_is_awaited() -> None:
    async def original() -> str:
        return "a"

    @replacement
    async def loud(original: Any) -> str:
        return str(await original()).upper()

    answers = [True, False]
    made = gated(loud(original), original, lambda: answers.pop(0))
    assert inspect.iscoroutinefunction(made) and not inspect.iscoroutinefunction(gated(louder(len), len, bool))
    waiting = made()
    assert len(answers) == 2
    assert asyncio.run(waiting) == "A" and asyncio.run(made()) == "a"


def test_it_looks_like_the_replacement_and_leads_to_the_original() -> None:
    loud, original = louder(len), len
    loud.kept = 1
    made = gated(loud, original, bool)
    assert isinstance(made, types.FunctionType)
    assert (made.__name__, made.kept, made.__wrapped__) == ("function", 1, original)  # type: ignore[attr-defined]
