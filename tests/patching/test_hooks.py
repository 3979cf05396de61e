"""Post-import hooks: imported modules, later imports, failures, cancellation, order, threads."""

from __future__ import annotations

import importlib
import itertools
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from jetrl_patch.errors import PatchError
from jetrl_patch.patching.patch import watch

MakeModule = Callable[[str], str]
_numbers = itertools.count()


@pytest.fixture
def make_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeModule]:
    """Write a module under a name that no other test uses, and return the name."""
    monkeypatch.syspath_prepend(str(tmp_path))
    names: list[str] = []

    def make(source: str) -> str:
        name = f"jetrl_hook_fixture_{next(_numbers)}"
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))
        importlib.invalidate_caches()
        names.append(name)
        return name

    yield make
    for name in names:
        sys.modules.pop(name, None)


def test_a_module_that_is_already_there(make_module: MakeModule) -> None:
    name = make_module("x = 1")
    module = importlib.import_module(name)
    seen: list[ModuleType] = []
    hook = watch(name, seen.append)
    assert seen == [module]
    assert hook.fired


def test_a_later_import_and_the_order_of_registration(make_module: MakeModule) -> None:
    name = make_module("x = 1")
    seen: list[str] = []
    watch(name, lambda module: seen.append(f"first {module.x}"))
    watch(name, lambda module: seen.append(f"second {module.x}"))
    assert seen == []
    assert name not in sys.modules
    importlib.import_module(name)
    assert seen == ["first 1", "second 1"]
    importlib.import_module(name)
    assert len(seen) == 2


def test_a_cancelled_hook_is_never_called(make_module: MakeModule) -> None:
    name = make_module("x = 1")
    seen: list[str] = []
    watch(name, lambda _: seen.append("stays"))
    hook = watch(name, lambda _: seen.append("cancelled"))
    hook.cancel()
    hook.cancel()
    importlib.import_module(name)
    assert seen == ["stays"]


def test_a_hook_may_cancel_the_one_after_it(make_module: MakeModule) -> None:
    name = make_module("x = 1")
    seen: list[ModuleType] = []
    watch(name, lambda _: second.cancel())
    second = watch(name, seen.append)
    importlib.import_module(name)
    assert seen == []


def test_all_cancelled_then_watched_again(make_module: MakeModule) -> None:
    name = make_module("x = 1")
    seen: list[str] = []
    watch(name, lambda _: seen.append("one")).cancel()
    watch(name, lambda _: seen.append("two"))
    importlib.import_module(name)
    assert seen == ["two"]


def test_a_failing_hook_fails_the_import_and_can_be_watched_again(make_module: MakeModule) -> None:
    name = make_module("x = 1")

    def fail(_: ModuleType) -> None:
        raise PatchError("does not fit")

    watch(name, fail)
    later: list[ModuleType] = []
    second = watch(name, later.append)
    with pytest.raises(PatchError, match="does not fit"):
        importlib.import_module(name)
    assert name not in sys.modules
    assert later == []
    assert not second.fired
    seen: list[ModuleType] = []
    watch(name, seen.append)
    module = importlib.import_module(name)
    assert seen == [module]


def test_a_module_whose_own_import_fails_keeps_its_hooks(make_module: MakeModule, tmp_path: Path) -> None:
    name = make_module("raise OSError('not today')")
    seen: list[ModuleType] = []
    watch(name, seen.append)
    with pytest.raises(OSError, match="not today"):
        importlib.import_module(name)
    assert seen == []
    (tmp_path / f"{name}.py").write_text("longer_than_before = 'so that no cached bytecode is taken'")
    importlib.invalidate_caches()
    importlib.import_module(name)
    assert len(seen) == 1


IN_THE_MIDDLE = """
import sys
from jetrl_patch.patching.patch import watch
hooks = [watch(__name__, sys.jetrl_test_seen) for _ in range(2)]
"""


def test_a_module_in_the_middle_of_its_own_import_is_waited_for(
    make_module: MakeModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So torch's entry point meets the module that imports torch first."""
    seen: list[int] = []
    monkeypatch.setattr(sys, "jetrl_test_seen", lambda module: seen.append(module.late), raising=False)
    module = importlib.import_module(make_module(f"{IN_THE_MIDDLE}assert not hooks[0].fired\nlate = 1"))
    assert seen == [1, 1] and all(hook.fired for hook in module.hooks)
    assert type(module.__spec__) is ModuleSpec and not module.__spec__._initializing


def test_a_hook_in_the_middle_that_fails_fails_the_import(make_module: MakeModule, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: ModuleType) -> None:
        raise PatchError("does not fit")

    monkeypatch.setattr(sys, "jetrl_test_seen", fail, raising=False)
    name = make_module(IN_THE_MIDDLE)
    with pytest.raises(PatchError, match="does not fit"):
        importlib.import_module(name)
    assert name not in sys.modules


def test_an_import_that_fails_keeps_the_hooks_of_its_middle(
    make_module: MakeModule, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[ModuleType] = []
    monkeypatch.setattr(sys, "jetrl_test_seen", seen.append, raising=False)
    name = make_module(f"{IN_THE_MIDDLE}raise OSError('not today')")
    with pytest.raises(OSError, match="not today"):
        importlib.import_module(name)
    assert seen == []
    (tmp_path / f"{name}.py").write_text("shorter = 'so that no cached bytecode is taken'")
    importlib.invalidate_caches()
    module = importlib.import_module(name)
    assert seen == [module, module]


def test_a_module_that_another_thread_imports_is_waited_for(make_module: MakeModule) -> None:
    started, go_on = threading.Event(), threading.Event()
    sys.jetrl_test_events = (started, go_on)  # type: ignore[attr-defined]
    name = make_module(
        """
        import sys
        started, go_on = sys.jetrl_test_events
        started.set()
        go_on.wait(20)
        late = 1
        """
    )
    importer = threading.Thread(target=importlib.import_module, args=(name,))
    importer.start()
    try:
        assert started.wait(20)
        seen: list[int] = []
        watcher = threading.Thread(target=watch, args=(name, lambda module: seen.append(module.late)))
        watcher.start()
        go_on.set()
        watcher.join(20)
        importer.join(20)
        assert seen == [1]
    finally:
        go_on.set()
        importer.join(20)
        del sys.jetrl_test_events  # type: ignore[attr-defined]
