"""Applying one patch: descriptors, missing targets, names."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest

from jetrl_patch.errors import PatchError
from jetrl_patch.patching.journal import Journal
from jetrl_patch.patching.patch import Patch, apply_patch, find_target

SOURCE = """
def function(x):
    "docstring of the original"
    return x

class Base:
    @staticmethod
    def static(x): return x
    @classmethod
    def cls(klass, x): return (klass.__name__, x)
    def method(self, x): return x
    @property
    def prop(self): return 1

class Child(Base):
    class Inner:
        def method(self): return "inner"
"""


@pytest.fixture
def module() -> types.ModuleType:
    made = types.ModuleType("fake_framework")
    exec(SOURCE, vars(made))
    return made


def patch(attr: str, make: Callable[[Any], Any]) -> Patch:
    return Patch(module="fake_framework", attr=attr, make=make, reason="test", remove_when="never")


def doubled(original: Callable[..., Any]) -> Callable[..., Any]:
    def replacement(*args: Any) -> Any:
        return [original(*args), original(*args)]

    return replacement


@pytest.mark.parametrize("attr", ["function", "Base.static", "Base.cls", "Base.method", "Child.static", "Child.cls"])
def test_every_kind_of_function_goes_in_and_comes_out(module: types.ModuleType, attr: str) -> None:
    owner, name, _ = find_target(module, attr)
    before = dict(vars(owner))
    instance = owner() if isinstance(owner, type) else owner
    result = getattr(instance, name)(3)
    journal = Journal()
    apply_patch(patch(attr, doubled), module, journal)
    assert getattr(instance, name)(3) == [result, result]
    assert [r.target for r in journal.records] == [f"fake_framework.{attr}"]
    journal.rollback()
    assert dict(vars(owner)) == before
    assert getattr(instance, name)(3) == result


def test_kinds_of_descriptors_are_kept(module: types.ModuleType) -> None:
    journal = Journal()
    for attr in ("Base.static", "Base.cls"):
        apply_patch(patch(attr, doubled), module, journal)
    assert isinstance(vars(module.Base)["static"], staticmethod)
    assert isinstance(vars(module.Base)["cls"], classmethod)
    assert module.Base.cls(1) == [("Base", 1), ("Base", 1)]
    assert module.Child.cls(1) == [("Child", 1), ("Child", 1)]


def test_a_property_arrives_as_it_is(module: types.ModuleType) -> None:
    original = vars(module.Base)["prop"]
    journal = Journal()
    apply_patch(patch("Base.prop", lambda prop: property(lambda self: prop.fget(self) + 1)), module, journal)
    assert module.Base().prop == 2
    journal.rollback()
    assert vars(module.Base)["prop"] is original


def test_the_replacement_carries_the_name_of_the_original(module: types.ModuleType) -> None:
    original = module.function
    apply_patch(patch("function", doubled), module, Journal())
    assert module.function.__name__ == "function"
    assert module.function.__doc__ == "docstring of the original"
    assert module.function.__wrapped__ is original


def test_two_patches_on_one_target_nest(module: types.ModuleType) -> None:
    original = module.function
    journal = Journal()
    apply_patch(patch("function", doubled), module, journal)
    apply_patch(patch("function", lambda f: lambda x: ("outer", f(x))), module, journal)
    assert module.function(1) == ("outer", [1, 1])
    journal.rollback()
    assert module.function is original


def test_nested_classes(module: types.ModuleType) -> None:
    apply_patch(patch("Child.Inner.method", doubled), module, Journal())
    assert module.Child.Inner().method() == ["inner", "inner"]


@pytest.mark.parametrize(
    ("attr", "missing"),
    [
        ("gone", "fake_framework.gone"),
        ("Gone.method", "fake_framework.Gone"),
        ("Base.gone", "fake_framework.Base.gone"),
        ("Child.Inner.gone", "fake_framework.Child.Inner.gone"),
    ],
)
def test_a_missing_target_is_named_by_its_first_missing_part(module: types.ModuleType, attr: str, missing: str) -> None:
    journal = Journal()
    with pytest.raises(PatchError, match=f"^{missing} is missing"):
        apply_patch(patch(attr, doubled), module, journal)
    assert journal.records == ()


def test_a_patch_that_cannot_be_built(module: types.ModuleType) -> None:
    def make(_: Any) -> Any:
        raise KeyError("oops")

    with pytest.raises(PatchError, match=r"The patch of fake_framework\.function failed\. KeyError"):
        apply_patch(patch("function", make), module, Journal())
    with pytest.raises(PatchError, match="required a replacement, found None"):
        apply_patch(patch("function", lambda _: None), module, Journal())


def test_a_lazy_module_is_asked_through_its_getattr() -> None:
    lazy = types.ModuleType("fake_framework")

    def load(name: str) -> Any:
        if name != "function":
            raise AttributeError(name)
        return len

    lazy.__getattr__ = load  # type: ignore[method-assign]
    journal = Journal()
    apply_patch(patch("function", doubled), lazy, journal)
    assert lazy.function([1]) == [1, 1]
    journal.rollback()
    assert "function" not in vars(lazy)
    assert lazy.function is len
