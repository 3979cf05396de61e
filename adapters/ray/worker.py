"""What runs in a Ray worker, called by the functions of ``hook.py``."""

from __future__ import annotations

import importlib
import socket
from collections.abc import Callable, Mapping
from typing import Any

from jetrl_patch import session
from jetrl_patch.config import Config
from jetrl_patch.errors import ConflictError, NotPatchedError, explain
from jetrl_patch.patching.identity import identity


def start(version: str, settings: Mapping[str, str]) -> None:
    """Patch this process as the driver is, before user code runs in it.

    Raises ConflictError if the plugin's version or settings differ from the driver's, NotPatchedError if the environment
    switches the plugin off, and any error of ``enable()``. Ray then ends the worker with the error's text.
    """
    where = f"Ray worker on node {socket.gethostname()}"
    if version != identity():
        required, fix = f"{version}, as in the driver", "install the same sources on every node"
        raise ConflictError(explain(f"jetrl_patch in the {where}", required=required, found=identity(), fix=fix))
    expected = Config.from_env(settings)
    if not session.activate_from_env():
        required, found = "JETRL_ENABLED=1, as in the driver", "an environment that switches the plugin off"
        fix = "remove JETRL_* from the runtime_env of tasks and actors"
        raise NotPatchedError(explain(where, required=required, found=found, fix=fix))
    session.require_active(where, expected)


def run_hook(hook: Callable[[], Any] | str | None) -> None:
    """Run the user's own setup hook: a function, or a dotted path as Ray accepts it."""
    if isinstance(hook, str):
        module, _, name = hook.rpartition(".")
        getattr(importlib.import_module(module), name)()
    elif hook is not None:
        hook()


def report() -> dict[str, Any]:
    """Return ``session.status()`` as plain data, and the settings as ``JETRL_*`` variables."""
    status = session.status()
    return {
        "enabled": status.enabled,
        "failure": status.failure,
        "settings": status.config.to_env() if status.config is not None else {},
        "status": status.as_dict(),
    }
