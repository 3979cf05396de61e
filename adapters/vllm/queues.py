"""The shared memory of vLLM's processes: nothing of it is left behind.

A queue between an engine and its workers has a name in ``/dev/shm`` that its writer removes when it ends, which a killed process
never does. The name is needed only until every reader has mapped the memory. So it is with the memory over which tensor-parallel
workers on a CPU reduce (4 MB a worker).

A worker that loads a checkpoint draws a progress bar. tqdm then makes a lock for bars of several processes, which in a spawned
process is a semaphore with such a name (32 bytes). No other process can have that lock, so none is made there.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable
from typing import Any

from jetrl_patch.gate import while_active

__all__ = ["create_mp_lock", "init_cpu_shm", "wait_until_ready"]


@while_active
def wait_until_ready(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wrap ``MessageQueue.wait_until_ready``: once it returns in the writer, all readers on this machine have the memory."""

    def wait_until_ready(self: Any) -> None:
        original(self)
        if self._is_writer and self.buffer is not None and self.buffer.is_creator:
            self.buffer.shared_memory.unlink()
            self.buffer.is_creator = False  # so that nobody removes the name again

    return wait_until_ready


@while_active
def init_cpu_shm(original: Callable[[Any], int]) -> Callable[[Any], int]:
    """Wrap ``_CPUSHMDistributed._init_cpu_shm``: it ends with a barrier, after which each rank has mapped the memory of all."""

    def init_cpu_shm(self: Any) -> int:
        handle = original(self)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"/dev/shm/{self.group_name}_{self.communicator.rank}")
        return handle

    return init_cpu_shm


@while_active
def create_mp_lock(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wrap ``TqdmDefaultWriteLock.create_mp_lock``: in a spawned process, bars have the lock of their threads alone."""

    def create_mp_lock(cls: Any) -> None:
        if multiprocessing.get_start_method(allow_none=True) != "spawn":
            original(cls)
        elif not hasattr(cls, "mp_lock"):
            cls.mp_lock = None

    return create_mp_lock
