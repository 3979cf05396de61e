"""How an engine's process ended, in words.

The pipe by which vLLM sees that a process ends is closed a moment before the process can be asked for its exit status, and
vLLM then reports ``Failed core proc(s): {}``.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from multiprocessing import connection
from typing import Any

from jetrl_patch.gate import while_active

__all__ = ["finished_procs"]

_PATIENCE = 10.0  # seconds that a process may need to its end after its pipe is closed


@while_active
def finished_procs(original: Callable[[Any], dict[str, Any]]) -> Callable[[Any], dict[str, Any]]:
    """Wrap ``CoreEngineProcManager.finished_procs``: wait for the processes that are ending, and name a signal that ended one."""

    def finished_procs(self: Any) -> dict[str, Any]:
        for process in self.processes:
            if process.pid is not None and connection.wait([process.sentinel], timeout=0):
                process.join(_PATIENCE)
        return {name: _in_words(status) for name, status in original(self).items()}

    return finished_procs


def _in_words(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:  # a signal without a name
        return f"killed by signal {-status}"
