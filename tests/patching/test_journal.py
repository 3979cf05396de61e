"""The journal: raw entries, NOTSET, reverse order, conflicts."""

from __future__ import annotations

import os
import types
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetrl_patch.errors import ConflictError, PatchError
from jetrl_patch.patching.journal import NOTSET, Journal, raw_entry


class Base:
    @staticmethod
    def static() -> str:
        return "static"

    @classmethod
    def cls(cls) -> str:
        return cls.__name__

    def method(self) -> str:
        return "method"

    @property
    def prop(self) -> str:
        return "prop"

    value = 1


class Child(Base):
    pass


def entries(owner: type) -> dict[str, object]:
    return dict(vars(owner))


@pytest.mark.parametrize("name", ["static", "cls", "method", "prop", "value"])
def test_restores_the_raw_entry(name: str) -> None:
    before = entries(Base)
    journal = Journal()
    journal.set_attr(Base, name, object(), target=f"Base.{name}")
    assert vars(Base)[name] is not before[name]
    journal.rollback()
    assert vars(Base)[name] is before[name]
    assert entries(Base) == before
    assert journal.records == ()


def test_an_item_that_is_taken_away_comes_back() -> None:
    value = object()
    mapping: dict[str, object] = {"a": value}
    journal = Journal()
    journal.remove_item(mapping, "a", target="a")
    assert mapping == {} and journal.conflicts() == []
    journal.rollback()
    assert mapping == {"a": value} and mapping["a"] is value
    with pytest.raises(PatchError, match="cannot be changed"):
        journal.remove_item(mapping, "b", target="b")
    assert journal.records == ()


@pytest.mark.parametrize("name", ["static", "cls", "method", "prop", "value", "not_there_at_all"])
def test_an_inherited_attribute_is_deleted(name: str) -> None:
    assert raw_entry(Child, name) is NOTSET
    journal = Journal()
    journal.set_attr(Child, name, 5, target=f"Child.{name}")
    assert Child.__dict__[name] == 5
    journal.rollback()
    assert name not in vars(Child)
    assert Child.static() == "static"
    assert Child.cls() == "Child"


def test_newest_first() -> None:
    order: list[int] = []
    journal = Journal()
    for i in range(3):
        journal.add_undo(lambda i=i: order.append(i), target=str(i))
    assert [r.target for r in journal.records] == ["0", "1", "2"]
    journal.rollback()
    assert order == [2, 1, 0]
    journal.rollback()
    assert order == [2, 1, 0]


def test_items_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_NAME", "old")
    monkeypatch.delenv("OTHER_NAME", raising=False)
    table: dict[Any, Any] = {1: "one"}
    journal = Journal()
    journal.set_item(os.environ, "SOME_NAME", "new", target="env")
    journal.set_item(os.environ, "OTHER_NAME", "new", target="env")
    journal.set_item(table, 1, "eins", target="table[1]")
    journal.set_item(table, 2, "zwei", target="table[2]")
    assert (os.environ["SOME_NAME"], os.environ["OTHER_NAME"], table) == ("new", "new", {1: "eins", 2: "zwei"})
    journal.rollback()
    assert os.environ["SOME_NAME"] == "old"
    assert "OTHER_NAME" not in os.environ
    assert table == {1: "one"}


def test_a_conflict_undoes_nothing_and_names_the_place() -> None:
    first, second = types.SimpleNamespace(a=1), types.SimpleNamespace(a=1)
    journal = Journal()
    journal.set_attr(first, "a", 2, target="first.a")
    journal.set_attr(second, "a", 2, target="second.a")
    theirs = object()
    first.a = theirs
    with pytest.raises(ConflictError, match=r"first\.a") as error:
        journal.rollback()
    assert "second.a" not in str(error.value)
    assert (first.a, second.a) == (theirs, 2)  # nothing was undone
    first.a = 2  # the other change is reverted
    journal.rollback()
    assert (first.a, second.a) == (1, 1)


def test_a_removed_attribute_is_a_conflict_too() -> None:
    owner = types.SimpleNamespace(a=1)
    journal = Journal()
    journal.set_attr(owner, "a", 2, target="owner.a")
    del owner.a
    with pytest.raises(ConflictError, match=r"owner\.a \(now NOTSET\)"):
        journal.rollback()


def test_force_leaves_the_disputed_place_and_undoes_the_rest() -> None:
    owner, other = types.SimpleNamespace(a=1), types.SimpleNamespace(a=1)
    journal = Journal()
    journal.set_attr(owner, "a", 2, target="owner.a")
    journal.set_attr(owner, "a", 3, target="owner.a again")
    journal.set_attr(other, "a", 2, target="other.a")
    owner.a = "theirs"
    with pytest.raises(ConflictError, match=r"owner\.a again"):
        journal.rollback(force=True)
    assert (owner.a, other.a) == ("theirs", 1)
    assert journal.records == ()


def test_a_failing_undo_does_not_stop_the_others() -> None:
    owner = types.SimpleNamespace(a=1)
    journal = Journal()
    journal.set_attr(owner, "a", 2, target="owner.a")

    def fail() -> None:
        raise OSError("no")

    journal.add_undo(fail, target="the thing")
    with pytest.raises(PatchError, match="the thing: OSError: no"):
        journal.rollback()
    assert owner.a == 1


def test_places_that_cannot_be_patched() -> None:
    class Slots:
        __slots__ = ("a",)

    class Stubborn:
        def __setattr__(self, name: str, value: object) -> None:
            pass

    journal = Journal()
    with pytest.raises(PatchError, match="has no __dict__"):
        journal.set_attr(Slots(), "a", 1, target="x")
    with pytest.raises(PatchError, match=r"int\.real cannot be changed"):
        journal.set_attr(int, "real", 1, target="int.real")
    with pytest.raises(PatchError, match="does not keep"):
        journal.set_attr(Stubborn(), "a", 1, target="x")
    assert journal.records == ()


@settings(deadline=None, max_examples=200)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["Base", "Child", "module", "dict"]),
            st.sampled_from(["static", "cls", "method", "prop", "value", "extra", "more"]),
            st.integers(0, 3),
        ),
        max_size=25,
    )
)
def test_any_sequence_of_changes_comes_back_to_the_identical_objects(steps: list[tuple[str, str, int]]) -> None:
    class Parent(Base):
        static = staticmethod(Base.static)
        value = 7

    class Heir(Parent):
        pass

    module = types.ModuleType("m")
    module.value = object()  # type: ignore[attr-defined]
    table: dict[str, Any] = {"value": object(), "extra": None}
    owners: dict[str, Any] = {"Base": Parent, "Child": Heir, "module": module}
    spaces = [vars(Parent), vars(Heir), vars(module), table]
    before = [dict(space) for space in spaces]
    journal = Journal()
    for where, name, value in steps:
        if where == "dict":
            journal.set_item(table, name, value, target=f"table[{name}]")
        else:
            journal.set_attr(owners[where], name, value, target=f"{where}.{name}")
    assert journal.conflicts() == []
    journal.rollback()
    for space, old in zip(spaces, before):
        assert {k: id(v) for k, v in space.items()} == {k: id(v) for k, v in old.items()}
