"""vLLM names the signal that ended an engine's process, even right after the pipe closed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from types import SimpleNamespace

import jetrl_patch


def _killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _leaves(status: int) -> None:
    os._exit(status)


class Late:
    """A process whose pipe is closed before it has an exit status."""

    def __init__(self) -> None:
        self.name, self.pid, self.exitcode = "late", 1, None
        self.sentinel, write = os.pipe()
        os.close(write)

    def join(self, timeout: float) -> None:
        self.exitcode = -signal.SIGTERM


def test_signals_are_named_and_late_statuses_awaited() -> None:
    jetrl_patch.enable(precision="fp8-unified")
    from vllm.v1.engine.utils import CoreEngineProcManager

    context = multiprocessing.get_context("fork")
    unstarted = context.Process(target=_killed)
    running = context.Process(target=time.sleep, args=(600,), name="running")
    ended = [context.Process(target=_killed, name="killed"), context.Process(target=_leaves, args=(3,), name="left")]
    for process in (running, *ended):
        process.start()
    for process in ended:
        multiprocessing.connection.wait([process.sentinel], timeout=60)
    try:
        manager = SimpleNamespace(processes=[running, *ended, unstarted, Late()])
        found = CoreEngineProcManager.finished_procs(manager)
    finally:
        running.kill()
    assert found == {"killed": "killed by SIGKILL", "left": "exit status 3", "late": "killed by SIGTERM"}
