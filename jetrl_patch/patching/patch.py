"""A patch: what it replaces, how it is applied, and the hooks that apply it after the import of its module."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from jetrl_patch.errors import JetrlError, PatchError, explain
from jetrl_patch.patching.guards import installed_version, module_exists
from jetrl_patch.patching.journal import Journal

# ---- A patch as data, and how it is applied ------------------------------------------------------

#: ``upstream`` of a fix for a bug that nobody is known to have reported
NO_REPORT = "no report found"


@dataclass(frozen=True)
class Patch:
    """One attribute to replace.

    Attributes:
        module: dotted name of the module that holds the target. The patch does not import it.
        attr: path inside the module: ``"function"``, ``"Class.method"``.
        make: original -> replacement. For a staticmethod or classmethod both are plain functions; the result is wrapped again. A
            property is passed as a property.
        reason: what goes wrong without the patch, and what the patch does not cover.
        remove_when: the upstream change that makes the patch obsolete, with the release that has it, if one has.
        upstream: a link to the upstream report or change, if there is one. A fix without one says ``NO_REPORT``.
        fixes: the project whose bug the patch fixes; empty for the plugin's own patches. ``status()`` lists fixes separately, and
            ``Config.upstream_fixes`` turns them off.
        needed_by: the runs that do not start, or never finish a step, without the fix. Such a fix is never turned off.
        when: whether the replacement runs with these settings (a ``Config``); None if it always does.
        always: why the replacement must also run in an unpatched process; empty if the original runs there.
    """

    module: str
    attr: str
    make: Callable[[Any], Any]
    reason: str
    remove_when: str
    upstream: str = ""
    fixes: str = ""
    needed_by: str = ""
    when: Callable[[Any], bool] | None = None
    always: str = ""

    @property
    def target(self) -> str:
        """The dotted name for people and errors."""
        return f"{self.module}.{self.attr}"


@dataclass(frozen=True)
class OnImport:
    """A change to make once a module is imported, other than replacing an attribute: for instance a registry entry.

    ``apply(module, journal)`` makes its changes through the journal. The other attributes are those of ``Patch``.
    """

    module: str
    name: str
    apply: Callable[[types.ModuleType, Journal], None]
    reason: str
    remove_when: str = ""
    upstream: str = ""
    fixes: str = ""
    needed_by: str = ""

    @property
    def target(self) -> str:
        """The dotted name for people and errors."""
        return f"{self.module}:{self.name}"


def needed(patches: Iterable[Patch], config: Any) -> list[Patch]:
    """The patches whose replacement runs with these settings (a ``Config``)."""
    return [patch for patch in patches if patch.when is None or patch.when(config)]


def replacement(body: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make the ``make`` of a patch from a function that takes the original before the arguments of the call.

    >>> @replacement
    ... def plus_one(original: Any, x: int) -> int:
    ...     return original(x) + 1
    >>> plus_one(abs)(-2)
    3
    """

    @functools.wraps(body)
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return body(original, *args, **kwargs)

        async def awaited(*args: Any, **kwargs: Any) -> Any:
            return await body(original, *args, **kwargs)

        return awaited if inspect.iscoroutinefunction(body) else call

    return make


def constant(value: Any) -> Any:
    """A method that returns ``value``, whatever its arguments are: to implement a framework's interface by a table."""
    return staticmethod(lambda *_, **__: value)


def find_target(module: types.ModuleType, attr: str) -> tuple[Any, str, Any]:
    """``(owner, name, original)`` of ``module.attr``. For a class the original is the raw entry, looked up along the MRO.

    Raises PatchError with the dotted path of the first part that is missing.
    """
    *path, name = attr.split(".")
    owner: Any = module
    done = module.__name__
    for part in path:
        owner = _get(owner, part, done)
        done = f"{done}.{part}"
    original = _get(owner, name, done)  # getattr makes a lazy module load the attribute
    if inspect.isclass(owner):
        original = inspect.getattr_static(owner, name)
    return owner, name, original


def require_target(change: Patch | OnImport) -> None:
    """Raise PatchError unless the target exists; of a module that is not imported yet, unless its file does."""
    if not module_exists(change.module):
        root = change.module.split(".")[0]
        version = installed_version(root)
        raise PatchError(
            f"{change.target} is missing: {root}{f' {version}' if version else ''} has no module {change.module}. "
            f"Install a supported version of {root}; `jetrl doctor --status` lists them."
        )
    module = sys.modules.get(change.module)
    if isinstance(change, Patch) and module is not None and not importing(module):
        find_target(module, change.attr)


def apply_on_import(change: OnImport, module: types.ModuleType, journal: Journal) -> None:
    """Make the change. Raises PatchError with its name, or the JetrlError that it raises."""
    try:
        change.apply(module, journal)
    except JetrlError:
        raise
    except Exception as error:
        raise PatchError(f"The patch {change.target} failed. {type(error).__name__}: {error}") from error


def apply_patch(patch: Patch, module: types.ModuleType, journal: Journal, runs: Callable[[], bool] | None = None) -> None:
    """Replace the target with what ``patch.make`` returns for it.

    Args:
        runs: asked at each call of a replaced function; if it returns false, the original runs. None: the replacement always
            runs.

    Raises PatchError with the target's name.
    """
    owner, name, original = find_target(module, patch.attr)
    wrapped_in = type(original) if isinstance(original, (staticmethod, classmethod)) else None
    function = original.__func__ if wrapped_in is not None else original
    try:
        replacement = patch.make(function)
    except Exception as error:
        raise PatchError(f"The patch of {patch.target} failed. {type(error).__name__}: {error}") from error
    if replacement is None:
        raise PatchError(explain(patch.target, required="a replacement", found="None", fix="return one from make"))
    if isinstance(replacement, types.FunctionType):
        if isinstance(function, types.FunctionType) and not hasattr(replacement, "__wrapped__"):
            functools.update_wrapper(replacement, function)
        if runs is not None:
            replacement = gated(replacement, function, runs)
    if wrapped_in is not None and not isinstance(replacement, (staticmethod, classmethod)):
        replacement = wrapped_in(replacement)
    journal.set_attr(owner, name, replacement, target=patch.target, reason=patch.reason, remove_when=patch.remove_when)


def gated(replacement: Callable[..., Any], original: Callable[..., Any], runs: Callable[[], bool]) -> Callable[..., Any]:
    """A function that calls ``replacement`` if ``runs()`` is true, else ``original``. It looks like ``replacement``.

    ``runs`` is evaluated at each call; for a coroutine function, when the coroutine is awaited.
    """
    if inspect.iscoroutinefunction(replacement):

        @functools.wraps(replacement)
        async def chosen(*args: Any, **kwargs: Any) -> Any:
            return await (replacement if runs() else original)(*args, **kwargs)
    else:

        @functools.wraps(replacement)
        def chosen(*args: Any, **kwargs: Any) -> Any:
            return (replacement if runs() else original)(*args, **kwargs)

    chosen.__wrapped__ = original
    return chosen


def _get(owner: Any, name: str, done: str) -> Any:
    try:
        return getattr(owner, name)
    except AttributeError:
        kind = "module" if isinstance(owner, types.ModuleType) else type(owner).__name__
        root = done.split(".")[0]
        raise PatchError(
            f"{done}.{name} is missing: the {kind} {done} has no attribute {name!r}. "
            f"Install a supported version of {root}; `jetrl doctor --status` lists them."
        ) from None


# ---- Hooks on the import of a module, which can be cancelled -------------------------------------
# ``wrapt`` runs a hook right after the import of its module, and fails the import if the hook fails. It cannot unregister a hook,
# so a cancelled one stays there and does nothing. Not covered: a module that is removed from ``sys.modules`` and imported again
# has no hooks.

Callback = Callable[[ModuleType], None]


class ImportHook:
    """A callback that waits for the import of a module."""

    def __init__(self, callback: Callback) -> None:
        self._callback: Callback | None = callback
        self.fired = False

    def cancel(self) -> None:
        """Drop the callback. A call that was already made is not undone."""
        self._callback = None

    def fire(self, module: ModuleType) -> None:
        """Call the callback, unless that was done or cancelled."""
        callback, self._callback = self._callback, None
        if callback is not None:
            self.fired = True
            callback(module)


def watch(module: str, callback: Callback) -> ImportHook:
    """Call ``callback(module)`` once: now if the module is imported, else right after its import.

    Hooks of a module run in the order of registration. An error in a hook propagates from this call, or fails the
    ``import`` statement that ran the hook.
    """
    hook = ImportHook(callback)
    loaded = sys.modules.get(module)
    if loaded is not None and importing(loaded):
        loaded = importlib.import_module(module)  # waits if another thread is importing it
    if loaded is not None and importing(loaded):
        _at_the_end(loaded, hook.fire)
    elif loaded is not None:
        hook.fire(loaded)
    else:
        _at_the_next_import(module, hook.fire)
    return hook


def _at_the_next_import(module: str, callback: Callback) -> None:
    import wrapt  # not at the top: an unpatched program must load only what it would load anyway

    # if another thread has finished the import in the meantime, wrapt calls the hook at once
    wrapt.register_post_import_hook(callback, module)


def importing(module: ModuleType) -> bool:
    """Whether the import of a module has begun and not ended."""
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


# A module may import torch, whose entry point enables the plugin, in the middle of its own import. Python tells nobody when an
# import ends, but it then clears a flag of the module's spec.

class _Watched(ModuleSpec):
    """A spec that calls ``ended`` at the end of its module's import, and is an ordinary one again."""

    ended: list[Callback]

    @property
    def _initializing(self) -> bool:
        return True

    @_initializing.setter
    def _initializing(self, value: bool) -> None:
        callbacks = self.__dict__.pop("ended")
        self.__class__ = ModuleSpec  # type: ignore[assignment]
        self._initializing = value
        module = sys.modules.get(self.name)
        try:
            for callback in callbacks:
                if module is None:  # the import failed, and may be tried again
                    _at_the_next_import(self.name, callback)
                else:
                    callback(module)
        except BaseException:
            sys.modules.pop(self.name, None)
            raise


def _at_the_end(module: ModuleType, callback: Callback) -> None:
    """Call ``callback(module)`` at the end of the import that this thread is in. An error fails that import."""
    spec = module.__spec__
    if type(spec) is ModuleSpec:
        spec.__class__ = _Watched
        spec.__dict__["ended"] = []
    if not isinstance(spec, _Watched):
        what = f"import of {module.__name__}"
        raise PatchError(explain(what, required="a finished one", found="one that goes on", fix="call enable() before it"))
    spec.ended.append(callback)
