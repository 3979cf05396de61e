"""An adapter and patches for the fake framework."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from jetrl_patch.registry import Adapter, Config, Journal, OnImport, Patch


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


def load(name: str) -> ModuleType:
    return importlib.import_module(f"fakefw.{name}")


ALL = (patch("fakefw.a", "function"), patch("fakefw.a", "Class.static"), patch("fakefw.b", "Heir.static"))
