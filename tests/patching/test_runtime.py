"""enable, disable, status: all or nothing, twice the same, conflicts, late imports. With fake frameworks and adapters;
the real packages are in tests/test_undo.py.
"""

from __future__ import annotations

import dataclasses
import sys
from types import ModuleType
from typing import Any

import pytest

from jetrl_patch import session
from jetrl_patch.errors import ConflictError, NotPatchedError, PatchError
from jetrl_patch.registry import Config, Journal, OnImport
from tests.patching.fakes import ALL, Fake, load, patch


def test_patches_wait_for_their_module_and_come_back(use: Any, environment: dict[str, str]) -> None:
    adapter = Fake(ALL)
    use(adapter)
    before_a = dict(vars(load("a")))
    static = vars(load("a").Class)["static"]
    status = session.enable(precision="bf16")
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
    assert all(p.state == "applied" for p in session.status().patches)
    assert "fakefw.b.Heir.static" in str(session.status())
    assert Config.from_env() == Config(precision="bf16")

    session.disable()
    assert dict(vars(load("a"))) == before_a
    assert vars(load("a").Class)["static"] is static
    assert "static" not in vars(load("b").Heir)
    assert adapter.registry == {"mine": "old"}
    assert adapter.calls == ["check", "patches", "on_apply", "on_undo"]
    assert not session.is_active()
    assert not session.status().enabled
    session.disable()
    assert adapter.calls[-2:] == ["on_apply", "on_undo"]


def test_fixes_for_other_projects_follow_one_setting_and_are_listed_apart(use: Any, environment: dict[str, str]) -> None:
    fix = dataclasses.replace(patch("fakefw.a", "Class.static"), fixes="fakefw", upstream="https://example.org/1")
    needed = dataclasses.replace(patch("fakefw.b", "Class.static"), fixes="fakefw", upstream="no report", needed_by="a start")
    hooked: list[str] = []
    hook = OnImport("fakefw.a", "hook", lambda module, journal: hooked.append("hook"), "test", fixes="fakefw")
    use(Fake((patch("fakefw.a", "function"), fix, needed), (hook,)))
    for settings, on in (
        ({}, True),
        ({"precision": "bf16"}, False),
        ({"precision": "bf16", "upstream_fixes": True}, True),
        ({"upstream_fixes": False}, False),
    ):
        hooked.clear()
        status = session.enable(**settings)  # type: ignore[arg-type]
        assert (load("a").function(), load("b").Class.static()) == ("loud a", "loud static b")
        assert (load("a").Class.static() == "loud static a") is on is bool(hooked)
        fixes = [p.target for p in status.upstream_fixes]
        assert fixes == ["fakefw.a.Class.static"] * on + ["fakefw.b.Class.static"] + ["fakefw.a:hook"] * on
        own, apart = str(status).split("\n  upstream  ")
        assert apart.startswith(f"{len(fixes)} fixes for bugs of other projects, upstream_fixes={on}\n") and "  patches   " in own
        assert all(target in apart and target not in own for target in fixes)
        assert ("fakefw: test (https://example.org/1)" in apart) is on
        assert "fakefw.a.function" in own
        session.disable()


def test_a_second_enable_works(use: Any, environment: dict[str, str]) -> None:
    use(Fake(ALL))
    original = load("a").function
    for _ in range(3):
        session.enable()
        assert load("a").function() == "loud a"
        session.disable()
        assert load("a").function is original
    session.enable()
    assert load("b").Heir.static() == "loud static b"  # only the hook of the third session


def test_a_module_imported_after_disable_is_untouched(use: Any) -> None:
    use(Fake(ALL))
    session.enable()
    session.disable()
    assert load("b").Heir.static() == "static b"


def test_same_call_twice_does_nothing_another_config_raises(use: Any) -> None:
    adapter = Fake(ALL)
    use(adapter)
    session.enable(precision="fp8-unified")
    session.enable(precision="fp8-unified")
    session.enable(Config(precision="fp8-unified", align="exact"))  # the default made explicit
    assert adapter.calls.count("on_apply") == 1
    assert load("a").function() == "loud a"
    with pytest.raises(ConflictError, match=r"required .*'linear'.*found .*'exact'.*disable"):
        session.enable(align="linear")
    assert session.active_config().exact


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
            session.enable()
        assert "on_apply" not in adapter.calls
        assert load("a").function() == "a"
        assert not session.is_active()


def test_a_patch_that_fails_in_the_middle_leaves_nothing(use: Any, environment: dict[str, str]) -> None:
    def fail(_: Any) -> Any:
        raise RuntimeError("in the middle")

    first, second = Fake(ALL), Fake([patch("fakefw.a", "Class.static", fail), patch("fakefw.a", "Heir")])
    use(first, second)
    module = load("a")
    before, static = dict(vars(module)), vars(module.Class)["static"]
    with pytest.raises(PatchError, match="in the middle"):
        session.enable()
    assert dict(vars(module)) == before
    assert vars(module.Class)["static"] is static
    assert first.registry == second.registry == {"mine": "old"}
    assert not session.is_active()
    assert "in the middle" in session.status().failure
    assert load("b").Heir.static() == "static b"  # its hook was cancelled


def test_a_target_that_is_missing_at_a_late_import_fails_it_and_takes_all_down(
    use: Any, environment: dict[str, str]
) -> None:
    use(Fake([*ALL, patch("fakefw.b", "gone")]))
    original = load("a").function
    session.enable()
    assert load("a").function() == "loud a"
    with pytest.raises(PatchError, match=r"fakefw\.b\.gone is missing"):
        load("b")
    assert "fakefw.b" not in sys.modules
    assert not session.is_active()
    assert load("a").function is original
    with pytest.raises(NotPatchedError, match=r"fakefw\.b\.gone is missing"):
        session.require_active("the trainer")
    assert load("b").Heir.static() == "static b"


def test_an_import_error_that_somebody_swallows_inside_enable_still_fails_it(use: Any) -> None:
    def swallow(module: ModuleType, journal: Journal) -> None:
        with pytest.raises(PatchError):
            load("b")

    hook = OnImport(module="fakefw.a", name="swallow", apply=swallow, reason="test")
    use(Fake([patch("fakefw.b", "gone")], [hook]))
    load("a")
    with pytest.raises(PatchError, match=r"fakefw\.b\.gone"):
        session.enable()
    assert not session.is_active()


def test_hooks_run_with_the_journal(use: Any) -> None:
    table: dict[str, int] = {}
    hook = OnImport(
        module="fakefw.b",
        name="table",
        apply=lambda module, journal: journal.set_item(table, "entry", 1, target="table['entry']"),
        reason="an entry",
    )
    use(Fake((), [hook]))
    session.enable()
    assert table == {}
    load("b")
    assert table == {"entry": 1}
    session.disable()
    assert table == {}


def test_a_hook_that_fails_is_named(use: Any) -> None:
    hook = OnImport(module="fakefw.b", name="table", apply=lambda *_: {}["x"], reason="an entry")
    use(Fake((), [hook]))
    session.enable()
    with pytest.raises(PatchError, match=r"fakefw\.b:table failed\. KeyError"):
        load("b")
    assert not session.is_active()


def test_disable_names_what_somebody_else_changed_and_undoes_nothing(use: Any) -> None:
    use(Fake(ALL))
    module = load("a")
    original = module.function
    session.enable()
    ours = module.function
    module.function = lambda: f"theirs {ours()}"
    with pytest.raises(ConflictError, match=r"fakefw\.a\.function"):
        session.disable()
    assert session.is_active()
    assert module.function() == "theirs loud a"
    assert module.Class.static() == "loud static a"
    module.function = ours
    session.disable()
    assert module.function is original


def test_a_failing_undo_of_an_adapter_ends_the_session(use: Any) -> None:
    class Bad(Fake):
        def on_apply(self, config: Config, journal: Journal) -> None:
            journal.add_undo(lambda: {}["x"], target="fakefw.thing")

    use(Bad(ALL))
    module = load("a")
    session.enable()
    with pytest.raises(PatchError, match=r"fakefw\.thing"):
        session.disable()
    assert module.function() == "a"
    assert not session.is_active()
