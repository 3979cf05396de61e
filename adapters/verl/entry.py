"""The module behind verl's entry point group ``verl.plugins``, loaded in every process that imports verl.

verl (0.9.1, ``verl/__init__.py``) logs a plugin's exception at debug level and continues without the plugin. A run that
opted in must not continue unpatched, so a failure here raises ``PluginFailed``. It is a ``BaseException``, which verl does
not catch.

If the environment does not opt in, verl's configuration still can (``preset.py``).
"""

from __future__ import annotations

from jetrl_patch import session
from jetrl_patch.adapters.verl import preset


class PluginFailed(BaseException):
    """Raised when this process could not be patched; its cause says why."""


def activate() -> None:
    """Patch this process if its environment opts in; otherwise watch for a configuration that does.

    Raises PluginFailed with the real error as its cause.
    """
    try:
        preset.offer()
        if not session.activate_from_env():
            preset.watch_verl()
    except Exception as error:
        raise PluginFailed(f"{type(error).__name__}: {error}") from error


activate()
