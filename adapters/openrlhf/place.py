"""Name the place where a process runs, for reports and errors."""

from __future__ import annotations

import os
import socket


def where() -> str:
    """Return the host name, and the raylet that started the process: several Ray nodes may share a host."""
    raylet = os.environ.get("RAY_RAYLET_PID")
    return f"{socket.gethostname()} (raylet {raylet})" if raylet else socket.gethostname()
