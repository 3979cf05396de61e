"""Where a trainer and a vLLM worker on one machine meet for a weight sync: a socket of this sync alone.

verl names the socket in /tmp by the number of Ray's job, of the replica and of the rank. That keeps runs apart that share a Ray
(https://github.com/verl-project/verl/issues/6233). But each run that starts a Ray of its own has job 1: of two on one machine the
second takes the first one's socket, one waits for weights that never come, and the other's worker may load them.

Within a run verl takes the same name again and again. A worker that was frozen, or given up, may still have a reply for the
sender of an earlier sync: ZeroMQ delivers it, even of a closed socket, to whoever listens at that name now. The new sender takes
this for its worker, its first message is lost, and both wait until their time-out.
"""

from __future__ import annotations

import hashlib
from typing import Any

__all__ = ["meet", "own", "run_id", "sync_id"]

_ATTRIBUTE = "_jetrl_synced"


def run_id() -> str:
    """Return what tells this process's Ray cluster from all others that are alive; empty outside a cluster."""
    import ray

    if not ray.is_initialized():
        return ""
    return hashlib.sha256(ray.get_runtime_context().gcs_address.encode()).hexdigest()[:12]


def sync_id(adapter: Any, step: int | None) -> str:
    """Return what tells the sync that begins from all others: the run, the step, and how often it was synced before.

    The training ranks of a rollout come to the same, because all of them take part in each sync.
    """
    last, times = getattr(adapter, _ATTRIBUTE, ("", 0))
    times = times + 1 if step == last else 0
    setattr(adapter, _ATTRIBUTE, (step, times))
    return f"{run_id()}.{step}.{times}"


def own(handle: str, sync: str) -> str:
    """Return the sync's own address in the place of verl's ``ipc:///tmp/….sock``."""
    return f"{handle.removesuffix('.sock')}-{sync}.sock" if sync else handle


def meet(worker: Any, sync: str) -> None:
    """Have verl's worker extension listen to this sync."""
    handle = own(type(worker)._get_zmq_handle(worker), sync)
    worker._get_zmq_handle = lambda: handle
