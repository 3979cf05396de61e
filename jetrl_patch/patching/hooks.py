"""Post-import hooks that can be cancelled.

``wrapt`` runs a hook right after the import of its module and fails the import if the hook fails, but it cannot
unregister a hook. So wrapt gets one dispatcher per module, and the hooks are kept in a table here.

Not covered: a module that is removed from ``sys.modules`` and imported again; the new module has no hooks.
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
    """A callback that waits for the import of a module. ``fired``: it was called. ``cancelled``: it never will be."""

    def __init__(self, module: str, callback: Callback) -> None:
        self.module = module
        self.callback = callback
        self.fired = False
        self.cancelled = False

    def cancel(self) -> None:
        """Drop the callback. A call that was already made is not undone."""
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

    Hooks of a module run in the order of registration. An error in a hook propagates from this call, or fails the
    ``import`` statement that ran the hook. Raises PatchError if the module is in the middle of its own import, when its
    attributes are not final.
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
        # if another thread has finished the import in the meantime, wrapt calls the dispatcher at once
        wrapt.register_post_import_hook(_dispatch, module)
    return hook


def _dispatch(module: ModuleType) -> None:
    """Run the hooks of a module. wrapt calls this once and drops it, so the next ``watch`` registers it again."""
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
        module = importlib.import_module(name)  # waits if another thread is importing it
        if _importing(module):
            raise PatchError(f"{name} is in the middle of its own import. Call enable() before importing it.")
    return module


def _importing(module: ModuleType) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))
