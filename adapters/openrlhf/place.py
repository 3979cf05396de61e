"""Where a process runs, for reports and errors."""

from __future__ import annotations

import os
import socket


def where() -> str:
    """Host name and, as several Ray nodes may share a host, the raylet that started the process or its parent."""
    raylet = os.environ.get("RAY_RAYLET_PID")
    return f"{socket.gethostname()} (raylet {raylet})" if raylet else socket.gethostname()
