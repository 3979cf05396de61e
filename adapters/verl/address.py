"""Where a trainer and a vLLM worker on one machine meet for a weight sync: a socket of this run alone.

verl names the socket in /tmp by the number of Ray's job, of the replica and of the rank. That keeps runs apart that share a Ray
(https://github.com/verl-project/verl/issues/6233). But each run that starts a Ray of its own has job 1: of two on one machine the
second takes the first one's socket, one waits for weights that never come, and the other's worker may load them.
"""

from __future__ import annotations

import hashlib
from typing import Any

__all__ = ["meet", "own", "run_id"]


def run_id() -> str:
    """Return what tells this process's Ray cluster from all others that are alive; empty outside a cluster."""
    import ray

    if not ray.is_initialized():
        return ""
    return hashlib.sha256(ray.get_runtime_context().gcs_address.encode()).hexdigest()[:12]


def own(handle: str, run: str) -> str:
    """Return the run's own address in the place of verl's ``ipc:///tmp/….sock``."""
    return f"{handle.removesuffix('.sock')}-{run}.sock" if run else handle


def meet(worker: Any, run: str) -> None:
    """Have verl's worker extension listen to this run from now on."""
    handle = own(type(worker)._get_zmq_handle(worker), run)
    worker._get_zmq_handle = lambda: handle
