"""The entry point of group ``verl.plugins``, imported in every process that imports verl.

verl (0.9.1, ``verl/__init__.py``) logs a plugin's exception at debug level and goes on without the plugin. A run that opted in
must not go on unpatched, so a failure here raises ``PluginFailed``, a ``BaseException``, which verl does not catch.

If the environment does not opt in, verl's configuration still can (``preset.py``).
"""

from __future__ import annotations

from jetrl_patch import session
from jetrl_patch.adapters.verl import preset
from jetrl_patch.errors import PluginFailed
from jetrl_patch.patching.patch import watch


def activate() -> None:
    """Patch this process if its environment opts in; otherwise watch for a configuration that does.

    Raises PluginFailed with the real error as its cause.
    """
    with PluginFailed.instead():
        watch("hydra.core.config_store", preset.store)
        if not session.activate_from_env():
            preset.watch_verl()


activate()
