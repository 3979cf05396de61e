"""What the engines hold, before a delta sync (``sync="delta"``): from it the trainer decides what to send.

A colocated engine says it in its first reply (``transport``). A checkpoint engine has no way back to the trainer, so the trainer
loop asks the engines and tells the training workers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from jetrl_patch.adapters.verl.state import WORKER
from jetrl_patch.config import Config
from jetrl_patch.errors import SyncError
from jetrl_patch.gate import while_config
from jetrl_patch.sync.base import held_by
from jetrl_patch.sync.source import Source

__all__ = ["announce", "attach", "collective_rpc", "greeted", "prepare"]

_OFFER = "jetrl_offer"
_REPORT = "jetrl_report"


async def announce(manager: Any, config: Config) -> None:
    """Ask the engines of a ``CheckpointEngineManager`` and tell its training workers, before a sync that is not naive."""
    import ray

    calls = [replica.servers[0].collective_rpc.remote(_REPORT, args=(False,)) for replica in manager.replicas]
    try:
        answers = await asyncio.wait_for(asyncio.gather(*calls), config.sync_timeout)
    except (TimeoutError, asyncio.TimeoutError) as error:
        raise SyncError(
            f"the vLLM workers did not say within {config.sync_timeout:g} s which weights they hold. Check their logs, or raise "
            "JETRL_SYNC_TIMEOUT."
        ) from error
    size = manager.actor_wg.world_size
    ray.get(manager.actor_wg.execute_checkpoint_engine([_OFFER] * size, [held_by(answers)] * size))


@while_config(lambda config: config.sync == "delta")
def collective_rpc(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``vLLMHttpServer.collective_rpc``: return what the engine's workers answer to ``announce``."""

    async def collective_rpc(
        self: Any, method: Any, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if method != _REPORT:
            return await original(self, method, timeout=timeout, args=args, kwargs=kwargs)
        return await self.engine.collective_rpc(method=method, timeout=timeout, args=args, kwargs=kwargs)

    return collective_rpc


def attach(worker: Any) -> None:
    """Let a training worker take what ``announce`` tells: verl calls methods of its checkpoint engine by name."""
    engine = getattr(worker, "checkpoint_engine", None)
    if engine is not None:
        setattr(engine, _OFFER, _offered)


def _offered(held: str) -> None:
    WORKER.held = held


def prepare(source: Source) -> None:
    """Make a sync's base known before its stream is read. Over a checkpoint engine only the first rank sends, and needs one."""
    import torch.distributed as dist

    if source.base is not None and WORKER.separate:
        if dist.get_rank() == 0:
            source.base.offer(WORKER.held)
        else:
            source.base = None
    WORKER.base = source.base


def greeted(held: str) -> None:
    """Take the reply of the colocated engine, before the stream is read."""
    if WORKER.base is not None and not WORKER.separate:
        WORKER.base.offer(held)
