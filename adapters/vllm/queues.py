"""vLLM's processes: their shared memory, of which nothing is left behind, and how one ended, in words."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing import connection
from typing import Any

__all__ = ["create_mp_lock", "finished_procs", "init_cpu_shm", "wait_until_ready"]


# ---- How an engine's process ended, in words -----------------------------------------------------
# The pipe by which vLLM sees that a process ends is closed a moment before the process can be asked for its exit status, and
# vLLM then reports ``Failed core proc(s): {}``.

_PATIENCE = 10.0  # seconds that a process may need to its end after its pipe is closed


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


# ---- The shared memory of vLLM's processes: nothing of it is left behind -------------------------
# A queue between an engine and its workers has a name in ``/dev/shm`` that its writer removes when it ends, which a killed
# process never does. The name is needed only until every reader has mapped the memory. So it is with the memory over which
# tensor-parallel workers on a CPU reduce (4 MB a worker).
#
# A worker that loads a checkpoint draws a progress bar. tqdm then makes a lock for bars of several processes, which in a spawned
# process is a semaphore with such a name (32 bytes). No other process can have that lock, so none is made there.

def wait_until_ready(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wrap ``MessageQueue.wait_until_ready``: once it returns in the writer, all readers on this machine have the memory."""

    def wait_until_ready(self: Any) -> None:
        original(self)
        if self._is_writer and self.buffer is not None and self.buffer.is_creator:
            self.buffer.shared_memory.unlink()
            self.buffer.is_creator = False  # so that nobody removes the name again

    return wait_until_ready


def init_cpu_shm(original: Callable[[Any], int]) -> Callable[[Any], int]:
    """Wrap ``_CPUSHMDistributed._init_cpu_shm``: it ends with a barrier, after which each rank has mapped the memory of all."""

    def init_cpu_shm(self: Any) -> int:
        handle = original(self)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"/dev/shm/{self.group_name}_{self.communicator.rank}")
        return handle

    return init_cpu_shm


def create_mp_lock(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wrap ``TqdmDefaultWriteLock.create_mp_lock``: in a spawned process, bars have the lock of their threads alone."""

    def create_mp_lock(cls: Any) -> None:
        if multiprocessing.get_start_method(allow_none=True) != "spawn":
            original(cls)
        elif not hasattr(cls, "mp_lock"):
            cls.mp_lock = None

    return create_mp_lock
