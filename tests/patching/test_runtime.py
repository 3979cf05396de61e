"""enable, disable, status: all or nothing, twice the same, conflicts, late imports. With fake frameworks and adapters;
the real packages are in tests/test_undo.py.
"""

from __future__ import annotations

import importlib
import os
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from jetrl_patch import env, runtime
from jetrl_patch.adapters.base import Adapter, Config, Journal, OnImport, Patch
from jetrl_patch.errors import ConfigError, ConflictError, NotPatchedError, PatchError, VersionError
from jetrl_patch.patching import guards


def loud(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: f"loud {original(*args)}"


def patch(module: str, attr: str, make: Callable[[Any], Any] = loud) -> Patch:
    return Patch(module=module, attr=attr, make=make, reason="test", remove_when="never")


class Fake(Adapter):
    name = "fakefw"

    def __init__(self, patches: Sequence[Patch] = (), hooks: Sequence[OnImport] = ()) -> None:
        self.patch_list, self.hook_list = patches, hooks
        self.calls: list[str] = []
        self.registry: dict[str, str] = {"mine": "old"}

    def check(self, config: Config) -> None:
        self.calls.append("check")

    def patches(self, config: Config) -> Sequence[Patch]:
        self.calls.append("patches")
        return self.patch_list

    def hooks(self, config: Config) -> Sequence[OnImport]:
        return self.hook_list

    def on_apply(self, config: Config, journal: Journal) -> None:
        self.calls.append("on_apply")
        journal.set_item(self.registry, "mine", "new", target="fakefw.registry['mine']")

    def on_undo(self) -> None:
        self.calls.append("on_undo")


@pytest.fixture
def framework(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package ``fakefw`` with modules ``a`` and ``b`` that nobody has imported yet."""
    root = tmp_path / "fakefw"
    root.mkdir()
    (root / "__init__.py").write_text("")
    for name in "ab":
        (root / f"{name}.py").write_text(
            textwrap.dedent(f"""
            def function(): return "{name}"
            class Class:
                @staticmethod
                def static(): return "static {name}"
            class Heir(Class): pass
            """)
        )
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield root
    for name in [name for name in sys.modules if name.split(".")[0] == "fakefw"]:
        del sys.modules[name]


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch, framework: Path) -> Callable[..., None]:
    """Put these adapters in the place of the real ones."""

    def put(*adapters: Adapter) -> None:
        monkeypatch.setattr(runtime, "ADAPTERS", {str(i): ("fakefw",) for i in range(len(adapters))})
        monkeypatch.setattr(runtime, "_resolve", lambda name: adapters[int(name)])

    return put


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    """The environment before; it must be the same afterwards."""
    before = dict(os.environ)
    yield before
    runtime.disable()
    assert dict(os.environ) == {**before, "PYTEST_CURRENT_TEST": os.environ["PYTEST_CURRENT_TEST"]}


def load(name: str) -> ModuleType:
    return importlib.import_module(f"fakefw.{name}")


ALL = (patch("fakefw.a", "function"), patch("fakefw.a", "Class.static"), patch("fakefw.b", "Heir.static"))


def test_patches_wait_for_their_module_and_come_back(use: Any, environment: dict[str, str]) -> None:
    adapter = Fake(ALL)
    use(adapter)
    before_a = dict(vars(load("a")))
    static = vars(load("a").Class)["static"]
    status = runtime.enable(precision="bf16")
    assert "fakefw.b" not in sys.modules
    assert {p.target: p.state for p in status.patches if p.target.startswith("fakefw.")} == {
        "fakefw.a.function": "applied",
        "fakefw.a.Class.static": "applied",
        "fakefw.b.Heir.static": "waiting",
        "fakefw.registry['mine']": "applied",
    }
    assert load("a").function() == "loud a"
    assert load("b").Heir.static() == "loud static b"
    assert load("b").Class.static() == "static b"
    assert all(p.state == "applied" for p in runtime.status().patches)
    assert "fakefw.b.Heir.static" in str(runtime.status())
    assert Config.from_env() == Config(precision="bf16")

    runtime.disable()
    assert dict(vars(load("a"))) == before_a
    assert vars(load("a").Class)["static"] is static
    assert "static" not in vars(load("b").Heir)
    assert adapter.registry == {"mine": "old"}
    assert adapter.calls == ["check", "patches", "on_apply", "on_undo"]
    assert not runtime.is_active()
    assert not runtime.status().enabled
    runtime.disable()
    assert adapter.calls[-2:] == ["on_apply", "on_undo"]


def test_a_second_enable_works(use: Any, environment: dict[str, str]) -> None:
    use(Fake(ALL))
    original = load("a").function
    for _ in range(3):
        runtime.enable()
        assert load("a").function() == "loud a"
        runtime.disable()
        assert load("a").function is original
    runtime.enable()
    assert load("b").Heir.static() == "loud static b"  # the hook of the third session, and only that one


def test_a_module_imported_after_disable_is_untouched(use: Any) -> None:
    use(Fake(ALL))
    runtime.enable()
    runtime.disable()
    assert load("b").Heir.static() == "static b"


def test_same_call_twice_does_nothing_another_config_raises(use: Any) -> None:
    adapter = Fake(ALL)
    use(adapter)
    runtime.enable(precision="fp8-unified")
    runtime.enable(precision="fp8-unified")
    runtime.enable(Config(precision="fp8-unified", align="exact"))  # what None comes to
    assert adapter.calls.count("on_apply") == 1
    assert load("a").function() == "loud a"
    with pytest.raises(ConflictError, match=r"asked for .*'linear'.*but found .*'exact'.*disable"):
        runtime.enable(align="linear")
    assert runtime.active_config().exact


def test_missing_targets_are_found_before_anything_changes(use: Any, environment: dict[str, str]) -> None:
    load("a")
    for wrong, message in [
        (patch("fakefw.a", "gone"), r"fakefw\.a\.gone is missing"),
        (patch("fakefw.a", "Class.gone"), r"fakefw\.a\.Class\.gone is missing"),
        (patch("fakefw.nowhere", "function"), r"fakefw\.nowhere\.function is missing.*no module fakefw\.nowhere"),
    ]:
        adapter = Fake((*ALL, wrong))
        use(Fake(ALL), adapter)
        with pytest.raises(PatchError, match=message):
            runtime.enable()
        assert "on_apply" not in adapter.calls
        assert load("a").function() == "a"
        assert not runtime.is_active()


def test_a_patch_that_fails_in_the_middle_leaves_nothing(use: Any, environment: dict[str, str]) -> None:
    def fail(_: Any) -> Any:
        raise RuntimeError("in the middle")

    first, second = Fake(ALL), Fake([patch("fakefw.a", "Class.static", fail), patch("fakefw.a", "Heir")])
    use(first, second)
    module = load("a")
    before, static = dict(vars(module)), vars(module.Class)["static"]
    with pytest.raises(PatchError, match="in the middle"):
        runtime.enable()
    assert dict(vars(module)) == before
    assert vars(module.Class)["static"] is static
    assert first.registry == second.registry == {"mine": "old"}
    assert not runtime.is_active()
    assert "in the middle" in runtime.status().failure
    assert load("b").Heir.static() == "static b"  # its hook was cancelled


def test_a_target_that_is_missing_at_a_late_import_fails_it_and_takes_all_down(
    use: Any, environment: dict[str, str]
) -> None:
    use(Fake([*ALL, patch("fakefw.b", "gone")]))
    original = load("a").function
    runtime.enable()
    assert load("a").function() == "loud a"
    with pytest.raises(PatchError, match=r"fakefw\.b\.gone is missing"):
        load("b")
    assert "fakefw.b" not in sys.modules
    assert not runtime.is_active()
    assert load("a").function is original
    with pytest.raises(NotPatchedError, match=r"fakefw\.b\.gone is missing"):
        runtime.require_active("the trainer")
    assert load("b").Heir.static() == "static b"


def test_an_import_error_that_somebody_swallows_inside_enable_still_fails_it(use: Any) -> None:
    def swallow(module: ModuleType, journal: Journal) -> None:
        with pytest.raises(PatchError):
            load("b")

    hook = OnImport(module="fakefw.a", name="swallow", apply=swallow, reason="test")
    use(Fake([patch("fakefw.b", "gone")], [hook]))
    load("a")
    with pytest.raises(PatchError, match=r"fakefw\.b\.gone"):
        runtime.enable()
    assert not runtime.is_active()


def test_hooks_run_with_the_journal(use: Any) -> None:
    table: dict[str, int] = {}
    hook = OnImport(
        module="fakefw.b",
        name="table",
        apply=lambda module, journal: journal.set_item(table, "entry", 1, target="table['entry']"),
        reason="an entry",
    )
    use(Fake((), [hook]))
    runtime.enable()
    assert table == {}
    load("b")
    assert table == {"entry": 1}
    runtime.disable()
    assert table == {}


def test_a_hook_that_fails_is_named(use: Any) -> None:
    hook = OnImport(module="fakefw.b", name="table", apply=lambda *_: {}["x"], reason="an entry")
    use(Fake((), [hook]))
    runtime.enable()
    with pytest.raises(PatchError, match=r"fakefw\.b:table failed: KeyError"):
        load("b")
    assert not runtime.is_active()


def test_disable_names_what_somebody_else_changed_and_undoes_nothing(use: Any) -> None:
    use(Fake(ALL))
    module = load("a")
    original = module.function
    runtime.enable()
    ours = module.function
    module.function = lambda: f"theirs {ours()}"
    with pytest.raises(ConflictError, match=r"fakefw\.a\.function"):
        runtime.disable()
    assert runtime.is_active()
    assert module.function() == "theirs loud a"
    assert module.Class.static() == "loud static a"
    module.function = ours
    runtime.disable()
    assert module.function is original


def test_a_failing_undo_of_an_adapter_ends_the_session(use: Any) -> None:
    class Bad(Fake):
        def on_apply(self, config: Config, journal: Journal) -> None:
            journal.add_undo(lambda: {}["x"], target="fakefw.thing")

    use(Bad(ALL))
    module = load("a")
    runtime.enable()
    with pytest.raises(PatchError, match=r"fakefw\.thing"):
        runtime.disable()
    assert module.function() == "a"
    assert not runtime.is_active()


def test_opting_in_by_the_environment(use: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    use(Fake(ALL))
    assert runtime.activate_from_env() is False
    assert not runtime.is_active()
    monkeypatch.setenv("JETRL_PRECISION", "fp8-rollout")
    assert runtime.activate_from_env() is True
    assert runtime.active_config() == Config(precision="fp8-rollout")
    monkeypatch.setenv("JETRL_PRECISION", "bf16")
    assert runtime.activate_from_env() is True  # the session that stands has the last word
    assert runtime.active_config() == Config(precision="fp8-rollout")
    monkeypatch.setenv("JETRL_PRECISION", "fp8-rollout")
    runtime.disable()
    monkeypatch.setenv(env.SWITCH, "0")
    assert runtime.activate_from_env() is False


def test_enable_starts_from_the_environment(use: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    use(Fake(ALL))
    monkeypatch.setenv("JETRL_SCALE_FORMAT", "fp32")
    runtime.enable(precision="fp8-rollout")
    assert runtime.active_config() == Config(precision="fp8-rollout", scale_format="fp32")


def test_settings_that_are_wrong_change_nothing(use: Any, environment: dict[str, str]) -> None:
    adapter = Fake(ALL)
    use(adapter)
    for overrides in ({"precision": "fp9"}, {"precison": "bf16"}, {"precision": "bf16", "align": "exact"}):
        with pytest.raises(ConfigError):
            runtime.enable(**overrides)
    assert adapter.calls == []


def test_enable_from_inside_an_enable_that_is_under_way(use: Any) -> None:
    class Nested(Fake):
        def on_apply(self, config: Config, journal: Journal) -> None:
            assert runtime.activate_from_env() is True  # what a plugin does that is loaded right now
            runtime.enable(config)
            with pytest.raises(ConflictError):
                runtime.enable(config, sync_timeout=1.0)

    use(Nested(ALL))
    runtime.enable()
    assert runtime.is_active()


def test_two_threads_enable_once(use: Any) -> None:
    adapter = Fake(ALL)
    use(adapter)
    threads = [threading.Thread(target=runtime.enable) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert adapter.calls.count("on_apply") == 1


def test_layers_and_backend_are_reported(use: Any) -> None:
    use(Fake(ALL))
    runtime.enable()
    assert runtime.status().backend == "auto"
    runtime.register_layers(["layers.0.q_proj", "layers.0.k_proj"])
    runtime.register_layers(["layers.0.k_proj", "layers.1.q_proj"])
    runtime.register_backend("native")
    status = runtime.status()
    assert status.layers == ("layers.0.q_proj", "layers.0.k_proj", "layers.1.q_proj")
    assert status.backend == "native"
    assert status.pid == os.getpid()
    assert status.as_dict()["config"]["precision"] == "fp8-unified"
    runtime.disable()
    runtime.enable()
    assert runtime.status().layers == ()


def test_require_active(use: Any) -> None:
    use(Fake(ALL))
    with pytest.raises(NotPatchedError, match=rf"the worker \(pid {os.getpid()}\) should be patched and is not"):
        runtime.require_active("the worker")
    with pytest.raises(NotPatchedError):
        runtime.active_config()
    runtime.enable()
    assert runtime.require_active("the worker", Config()) == Config().resolved()
    with pytest.raises(ConflictError, match="settings of the worker"):
        runtime.require_active("the worker", Config(precision="bf16"))


def test_nothing_to_patch_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "ADAPTERS", {"x": ("no_such_framework",)})
    with pytest.raises(VersionError, match=r"none of them installed.*pip install 'jetrl_patch\[verl\]'"):
        runtime.enable()


@pytest.mark.parametrize(
    ("dist", "found"),
    [("torch", "2.10.1"), ("torch", "2.14.0"), ("vllm", "0.29.0"), ("verl", "0.8.0"), ("verl", "main")],
)
def test_unsupported_versions_stop_before_anything_changes(
    use: Any, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, dist: str, found: str
) -> None:
    class Needs(Fake):
        requires = ("torch", "vllm", "verl")

    real = guards.installed_version
    monkeypatch.setattr(guards, "installed_version", lambda name: found if name == dist else real(name))
    adapter = Needs(ALL)
    use(adapter)
    required = guards.SUPPORTED[dist][0]
    with pytest.raises(VersionError, match=rf"{dist}{required} is required, but .*{found}.*install {dist}"):
        runtime.enable()
    assert adapter.calls == []


def test_an_adapter_that_is_missing_is_an_error(monkeypatch: pytest.MonkeyPatch, framework: Path) -> None:
    monkeypatch.setattr(runtime, "ADAPTERS", {"fakefw": ("fakefw",)})
    with pytest.raises(PatchError, match=r"jetrl_patch\.adapters\.fakefw\.adapter:ADAPTER is missing"):
        runtime.enable()


def test_without_the_adapters_package_the_error_names_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def import_module(name: str, package: str | None = None) -> ModuleType:
        if name == "jetrl_patch.adapters":
            raise ModuleNotFoundError("No module named 'jetrl_patch.adapters'", name="jetrl_patch.adapters")
        return real(name, package)

    monkeypatch.setattr(runtime.importlib, "import_module", import_module)
    with pytest.raises(PatchError, match=r"pip install -e \."):
        runtime._resolve("transformers")
