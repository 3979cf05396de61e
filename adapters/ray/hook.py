"""Functions that travel to Ray workers by value.

A nested function is pickled with its code, so it runs even where ``jetrl_patch`` is missing, and can report that. A function
pickled by name would only fail to import. So this file imports nothing of the package at its top; what the functions call in the
worker is in ``worker.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def make_hook(version: str, settings: Mapping[str, str], then: Callable[[], Any] | str | None) -> Callable[[], None]:
    """Make the ``worker_process_setup_hook``: patch this process, then run the user's own hook ``then``, if there is one.

    ``version`` (``identity()``) and ``settings`` (``JETRL_*`` variables) are those of the driver.
    """
    expected = dict(settings)

    def jetrl_patch_setup_hook() -> None:
        import socket
        import sys

        try:
            from jetrl_patch.adapters.ray.worker import run_hook, start
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

    With ``attempt``, for a worker without the hook, the task does what the hook does and reports any error.
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
            from jetrl_patch.adapters.ray.worker import report, start
            from jetrl_patch.patching.identity import identity

            if identity().startswith(f"{jetrl_patch.__version__}+"):  # else two installations are mixed
                found["version"] = identity()

            if attempt:
                start(version, expected)
            found.update(report())
        except Exception as error:  # any error is part of the report
            found["error"] = f"{type(error).__name__}: {error}"
        return found

    return jetrl_patch_probe
