"""What verl's entry point group ``verl.plugins`` loads, in the driver and in every Ray worker that imports verl.

verl (0.9.1, ``verl/__init__.py``) logs an exception of a plugin at debug level and goes on without it. A run that was
meant to be patched must not go on unpatched, so what goes wrong here leaves as ``PluginFailed``, which is no
``Exception`` and which verl therefore does not swallow.

Where the environment does not opt in, verl's configuration still may (``preset.py``).
"""

from __future__ import annotations

from jetrl_patch import runtime
from jetrl_patch.adapters.verl import preset


class PluginFailed(BaseException):
    """This process could not be patched; the cause says why."""


def activate() -> None:
    """Patch this process if its environment opts in, else look out for a configuration that does.

    Raises PluginFailed with the real error as its cause.
    """
    try:
        preset.offer()
        if not runtime.activate_from_env():
            preset.watch_verl()
    except Exception as error:
        raise PluginFailed(f"{type(error).__name__}: {error}") from error


activate()
