"""What runs in a Ray worker, and the functions that travel there by value."""

from __future__ import annotations

import importlib
import socket
from collections.abc import Callable, Mapping
from typing import Any

from jetrl_patch import session
from jetrl_patch._versions import VERSION
from jetrl_patch.config import Config
from jetrl_patch.errors import ConflictError, NotPatchedError, explain

__all__ = ["make_hook", "make_probe", "report", "run_hook", "start"]


# ---- Code that runs in a Ray worker, called by the functions in ``hook.py`` ----------------------

def start(version: str, settings: Mapping[str, str]) -> None:
    """Patch this process as the driver is, before user code runs in it.

    Raises ConflictError if the plugin's version or settings differ from the driver's, NotPatchedError if the environment
    switches the plugin off, and whatever ``enable()`` raises. Ray then ends the worker with this text.
    """
    where = f"Ray worker on node {socket.gethostname()}"
    if version != VERSION:
        raise ConflictError(
            explain(
                f"jetrl_patch in the {where}",
                required=f"{version}, as in the driver",
                found=VERSION,
                fix="install the same version on every node",
            )
        )
    expected = Config.from_env(settings)
    if not session.activate_from_env():
        raise NotPatchedError(
            explain(
                where,
                required="JETRL_ENABLED=1, as in the driver",
                found="an environment that switches it off",
                fix="remove JETRL_* from the runtime_env of tasks and actors",
            )
        )
    session.require_active(where, expected)


def run_hook(hook: Callable[[], Any] | str | None) -> None:
    """Run the user's own setup hook: a function, or a dotted path as Ray takes it."""
    if isinstance(hook, str):
        module, _, name = hook.rpartition(".")
        getattr(importlib.import_module(module), name)()
    elif hook is not None:
        hook()


def report() -> dict[str, Any]:
    """Return ``runtime.status()`` as plain data, and the settings as ``JETRL_*`` variables."""
    status = session.status()
    return {
        "enabled": status.enabled,
        "failure": status.failure,
        "settings": status.config.to_env() if status.config is not None else {},
        "status": status.as_dict(),
    }


# ---- Functions that travel to the workers by value -----------------------------------------------
# A nested function is pickled with its code, so it runs even where ``jetrl_patch`` is missing, and can report that. By
# name, Ray could only report a failed import. What these functions call in the package is in ``worker.py``.

def make_hook(version: str, settings: Mapping[str, str], then: Callable[[], Any] | str | None) -> Callable[[], None]:
    """Make the ``worker_process_setup_hook``: patch this process, then run the user's own hook ``then``.

    Args:
        version: of ``jetrl_patch`` in the driver.
        settings: the driver's, as ``JETRL_*`` variables.
        then: the user's hook: a function, a dotted path, or None.
    """
    expected = dict(settings)

    def jetrl_patch_setup_hook() -> None:
        import socket
        import sys

        try:
            pass
        except ImportError as error:
            found = getattr(sys.modules.get("jetrl_patch"), "__version__", "none")
            raise RuntimeError(
                f"jetrl_patch on node {socket.gethostname()} ({sys.executable}): required version {version}, as in "
                f"the driver, found {found} ({type(error).__name__}: {error}). Install that version on the node."
            ) from error
        start(version, expected)
        run_hook(then)

    return jetrl_patch_setup_hook


def make_probe(version: str, settings: Mapping[str, str], attempt: bool) -> Callable[[], dict[str, Any]]:
    """Make a task that reports the state of a worker as plain data: see ``worker.report``.

    ``attempt`` is for a worker without the hook: the task does what the hook does, and reports what goes wrong.
    """
    expected = dict(settings)

    def jetrl_patch_probe() -> dict[str, Any]:
        import os
        import socket
        import sys

        found: dict[str, Any] = {
            "pid": os.getpid(),
            "hostname": socket.gethostname(),
            "python": sys.executable,
            "version": None,
            "error": "",
        }
        try:
            import jetrl_patch

            found["version"] = jetrl_patch.__version__

            if attempt:
                start(version, expected)
            found.update(report())
        except Exception as error:
            found["error"] = f"{type(error).__name__}: {error}"
        return found

    return jetrl_patch_probe
