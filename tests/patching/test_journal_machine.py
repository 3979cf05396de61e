"""The journal together with other code that patches the same places, in any order, with failures and from many threads."""

from __future__ import annotations

import threading
import types
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from jetrl_patch.errors import ConflictError, PatchError
from jetrl_patch.patching.journal import NOTSET, Journal

PLACES = st.sampled_from([(where, name) for where in ("module", "table") for name in ("a", "b", "c")])


class Stubborn(types.ModuleType):
    """A module with one attribute that raises when it is set, once asked to."""

    refuses = False

    def __setattr__(self, name: str, value: object) -> None:
        if self.refuses:
            raise RuntimeError("not now")
        super().__setattr__(name, value)


class Patches(RuleBasedStateMachine):
    """The value of each place without the journal is known, and is restored."""

    def __init__(self) -> None:
        super().__init__()
        self.journal = Journal()
        self.module = Stubborn("m")
        self.spaces: dict[str, dict[str, Any]] = {"module": vars(self.module), "table": {}}
        for where, space in self.spaces.items():
            space["a"] = f"{where}.a"
        #: what other code last left in a place
        self.others: dict[tuple[str, str], object] = {
            (where, name): space.get(name, NOTSET) for where, space in self.spaces.items() for name in "abc"
        }
        #: what the journal last put there; a place is disputed if it holds anything else
        self.patched: dict[tuple[str, str], object] = {}
        self.undone: list[int] = []
        self.to_undo: list[int] = []

    def now(self, place: tuple[str, str]) -> object:
        where, name = place
        return self.spaces[where].get(name, NOTSET)

    def disputed(self) -> set[tuple[str, str]]:
        return {place for place, value in self.patched.items() if self.now(place) is not value}

    @rule(place=PLACES)
    def the_plugin_patches(self, place: tuple[str, str]) -> None:
        where, name = place
        value = object()
        if where == "table":
            self.journal.set_item(self.spaces[where], name, value, target=f"{where}.{name}")
        else:
            self.journal.set_attr(self.module, name, value, target=f"{where}.{name}")
        self.patched[place] = value

    @rule(name=st.sampled_from("abc"))
    def a_patch_fails(self, name: str) -> None:
        before = self.now(("module", name))
        types.ModuleType.__setattr__(self.module, "refuses", True)
        with pytest.raises(PatchError, match="cannot be changed"):
            self.journal.set_attr(self.module, name, object(), target=f"module.{name}")
        del self.module.refuses
        assert self.now(("module", name)) is before

    @rule()
    def the_plugin_records_an_undo(self) -> None:
        number = len(self.to_undo)
        self.to_undo.append(number)
        self.journal.add_undo(lambda: self.undone.append(number), target=f"undo {number}")

    @rule(place=PLACES)
    def other_code_patches(self, place: tuple[str, str]) -> None:
        where, name = place
        self.spaces[where][name] = self.others[place] = object()

    @rule(place=PLACES)
    def other_code_removes(self, place: tuple[str, str]) -> None:
        where, name = place
        self.spaces[where].pop(name, None)
        self.others[place] = NOTSET

    @rule(force=st.booleans())
    def the_plugin_is_disabled(self, force: bool) -> None:
        disputed = self.disputed()
        before = {place: self.now(place) for place in self.others}
        if not disputed:
            self.journal.rollback(force=force)
        else:
            with pytest.raises(ConflictError) as raised:
                self.journal.rollback(force=force)
            assert all(".".join(place) in str(raised.value) for place in disputed)
        if disputed and not force:
            assert {place: self.now(place) for place in self.others} == before
            return
        for place, value in self.others.items():
            assert self.now(place) is (before[place] if place in disputed else value)
            self.others[place] = self.now(place)
        assert self.undone == self.to_undo[::-1] and self.journal.records == ()
        self.patched, self.undone, self.to_undo = {}, [], []

    @invariant()
    def every_dispute_is_known(self) -> None:
        found = {entry.split(" (now")[0] for entry in self.journal.conflicts()}
        assert found == {".".join(place) for place in self.disputed()}


Patches.TestCase.settings = settings(max_examples=150, stateful_step_count=25, deadline=None)
TestPatches: Any = Patches.TestCase


def test_many_threads_patch_while_one_undoes() -> None:
    table: dict[str, object] = {f"{thread}.{i}": None for thread in range(8) for i in range(50)}
    before, journal, errors = dict(table), Journal(), []
    begin = threading.Barrier(9, timeout=60)

    def patch(thread: int) -> None:
        begin.wait()
        try:
            for i in range(50):
                journal.set_item(table, f"{thread}.{i}", object(), target=f"{thread}.{i}")
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=patch, args=(thread,)) for thread in range(8)]
    for thread in threads:
        thread.start()
    begin.wait()
    while any(thread.is_alive() for thread in threads):
        journal.rollback()
    journal.rollback()
    assert errors == [] and table == before and journal.records == ()
