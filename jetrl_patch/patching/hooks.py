"""Post-import hooks that can be cancelled.

``wrapt`` leaves the target unloaded until somebody needs it and fails the import when a hook fails, but it cannot
unregister. So exactly one dispatcher per module is given to wrapt, and the hooks stand in a table of our own.

Not covered: a module that is removed from ``sys.modules`` and imported again is a new module, and unhooked.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable
from types import ModuleType

import wrapt

from jetrl_patch.errors import PatchError

__all__ = ["ImportHook", "watch"]

Callback = Callable[[ModuleType], None]

_lock = threading.RLock()
_waiting: dict[str, list[ImportHook]] = {}
_armed: set[str] = set()


class ImportHook:
    """A callback that waits for a module. ``fired`` and ``cancelled`` say what became of it."""

    def __init__(self, module: str, callback: Callback) -> None:
        self.module = module
        self.callback = callback
        self.fired = False
        self.cancelled = False

    def cancel(self) -> None:
        """Never call the callback from now on; it does not undo a call that was already made."""
        with _lock:
            self.cancelled = True
            waiting = _waiting.get(self.module, [])
            if self in waiting:
                waiting.remove(self)

    def _fire(self, module: ModuleType) -> None:
        if self.cancelled or self.fired:
            return
        self.fired = True
        self.callback(module)


def watch(module: str, callback: Callback) -> ImportHook:
    """Call ``callback(module)`` once: now if the module is imported, else right after its import.

    Hooks of one module are called in the order of registration. What a hook raises comes out of this call, or out
    of the ``import`` statement that brought the module in, which then fails. Raises PatchError if the module stands
    in the middle of its own import, where its attributes are not final.
    """
    hook = ImportHook(module, callback)
    loaded = _finished_module(module)
    if loaded is not None:
        hook._fire(loaded)
        return hook
    with _lock:
        _waiting.setdefault(module, []).append(hook)
        arm = module not in _armed
        _armed.add(module)
    if arm:
        # if another thread finished the import since the look above, wrapt calls the dispatcher at once
        wrapt.register_post_import_hook(_dispatch, module)
    return hook


def _dispatch(module: ModuleType) -> None:
    """Called by wrapt once for a module; wrapt has forgotten us by then, so a new ``watch`` arms again."""
    name = module.__name__
    with _lock:
        _armed.discard(name)
        hooks = _waiting.pop(name, [])
    for hook in hooks:
        hook._fire(module)


def _finished_module(name: str) -> ModuleType | None:
    module = sys.modules.get(name)
    if module is None:
        return None
    if _importing(module):
        module = importlib.import_module(name)  # waits, if it is another thread that imports it
        if _importing(module):
            raise PatchError(
                f"{name} is in the middle of its own import, so it cannot be patched; call enable() before importing it"
            )
    return module


def _importing(module: ModuleType) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))
