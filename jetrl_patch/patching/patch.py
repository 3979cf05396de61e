"""A patch as data, and how one goes in."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jetrl_patch.errors import PatchError
from jetrl_patch.patching.journal import Journal

__all__ = ["OnImport", "Patch", "apply_patch", "find_target"]


@dataclass(frozen=True)
class Patch:
    """One replaced attribute.

    Attributes:
        module: dotted module that holds the target; it is not imported for the patch's sake.
        attr: path inside the module: ``"function"``, ``"Class.method"``.
        make: gets the original, gives the replacement. For a staticmethod or classmethod it gets the plain
            function, and the plain function it gives is wrapped the same way. A property arrives and leaves as such.
        reason: why this is here, and what it does not cover.
        remove_when: the upstream change that makes it superfluous.
        upstream: a link to the upstream report or change, if there is one.
    """

    module: str
    attr: str
    make: Callable[[Any], Any]
    reason: str
    remove_when: str
    upstream: str = ""

    @property
    def target(self) -> str:
        """The dotted name for people and errors."""
        return f"{self.module}.{self.attr}"


@dataclass(frozen=True)
class OnImport:
    """Something to do with a module once it is imported that is no replaced attribute: an entry in a registry.

    ``apply(module, journal)`` makes its changes through the journal.
    """

    module: str
    name: str
    apply: Callable[[types.ModuleType, Journal], None]
    reason: str
    remove_when: str = ""
    upstream: str = ""

    @property
    def target(self) -> str:
        """The dotted name for people and errors."""
        return f"{self.module}:{self.name}"


def find_target(module: types.ModuleType, attr: str) -> tuple[Any, str, Any]:
    """``(owner, name, original)`` of ``module.attr``; the original is the raw entry, found by the MRO for a class.

    Raises PatchError with the dotted path of the first part that is not there.
    """
    *path, name = attr.split(".")
    owner: Any = module
    done = module.__name__
    for part in path:
        owner = _get(owner, part, done)
        done = f"{done}.{part}"
    original = _get(owner, name, done)  # through getattr, so that a lazy module loads what it promises
    if inspect.isclass(owner):
        original = inspect.getattr_static(owner, name)
    return owner, name, original


def apply_patch(patch: Patch, module: types.ModuleType, journal: Journal) -> None:
    """Replace the target by what ``patch.make`` builds from it. Raises PatchError with the target's name."""
    owner, name, original = find_target(module, patch.attr)
    wrapped_in = type(original) if isinstance(original, (staticmethod, classmethod)) else None
    function = original.__func__ if wrapped_in is not None else original
    try:
        replacement = patch.make(function)
    except Exception as error:
        raise PatchError(f"{patch.target} could not be built: {type(error).__name__}: {error}") from error
    if replacement is None:
        raise PatchError(f"{patch.target}: the patch gave None instead of a replacement")
    if isinstance(replacement, types.FunctionType) and isinstance(function, types.FunctionType):
        _look_like(replacement, function)
    if wrapped_in is not None and not isinstance(replacement, (staticmethod, classmethod)):
        replacement = wrapped_in(replacement)
    journal.set_attr(owner, name, replacement, target=patch.target, reason=patch.reason, remove_when=patch.remove_when)


def _look_like(replacement: types.FunctionType, original: types.FunctionType) -> None:
    """Name, docstring and ``__wrapped__`` of the original, unless the patch has seen to it."""
    if not hasattr(replacement, "__wrapped__"):
        functools.update_wrapper(replacement, original)


def _get(owner: Any, name: str, done: str) -> Any:
    try:
        return getattr(owner, name)
    except AttributeError:
        kind = "module" if isinstance(owner, types.ModuleType) else type(owner).__name__
        raise PatchError(
            f"{done}.{name} is missing: the {kind} {done} has no attribute {name!r}; "
            f"this version of {done.split('.')[0]} does not fit, see the supported versions with `jetrl status`"
        ) from None
