"""The trainer's side of the weight sync in verl: what each rank sends, and what it reports."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator
from typing import Any

from jetrl_patch import session
from jetrl_patch.adapters.verl import old_log_probs, routes
from jetrl_patch.adapters.verl.state import RECORD, WORKER, report_key
from jetrl_patch.adapters.verl.transport import Peer, as_sync_error, ending_early, own, sync_id, watched_sender
from jetrl_patch.config import Config
from jetrl_patch.errors import UNQUANTIZED, ConflictError, NotPatchedError, SyncError, explain
from jetrl_patch.patching.patch import replacement
from jetrl_patch.sync.delta import held_by
from jetrl_patch.sync.send import SyncStats, half_stream
from jetrl_patch.trainer import rules
from jetrl_patch.trainer.audit import sync_report
from jetrl_patch.trainer.precision import scales_loss
from jetrl_patch.trainer.rules import MARK
from jetrl_patch.trainer.source import Source

# ---- Before a delta sync (``sync="delta"``): the weights that the engines hold decide what the trainer sends ----
# A colocated engine names them in its first reply (``transport.py``). A checkpoint engine has no channel back to the trainer, so
# the trainer loop asks the engines and tells the training workers.

_OFFER = "jetrl_offer"
_REPORT = "jetrl_report"


async def announce(manager: Any, config: Config) -> None:
    """Ask the engines of a ``CheckpointEngineManager`` and tell its training workers, before a sync over a checkpoint engine."""
    import ray

    calls = [replica.servers[0].collective_rpc.remote(_REPORT, args=(False,)) for replica in manager.replicas]
    try:
        answers = await asyncio.wait_for(asyncio.gather(*calls), config.sync_timeout)
    except TimeoutError as error:
        raise SyncError(
            f"the vLLM workers did not say within {config.sync_timeout:g} s which weights they hold. Check their logs, or raise "
            "JETRL_SYNC_TIMEOUT."
        ) from error
    size = manager.actor_wg.world_size
    ray.get(manager.actor_wg.execute_checkpoint_engine([_OFFER] * size, [held_by(answers)] * size))


@replacement
async def collective_rpc(original: Any, self: Any, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None) -> Any:
    """Wrap ``vLLMHttpServer.collective_rpc``: return the answers of the engine's workers to ``announce``."""
    if method != _REPORT:
        return await original(self, method, timeout=timeout, args=args, kwargs=kwargs)
    return await self.engine.collective_rpc(method=method, timeout=timeout, args=args, kwargs=kwargs)


def attach(worker: Any) -> None:
    """Let a training worker receive what ``announce`` sends: verl calls methods of its checkpoint engine by name.

    In a delta sync only rank 0 sends changes. By default, verl's other ranks on its node join each broadcast, and derive its size
    from their own stream, which has whole weights. They would wait forever, so they stay out.
    """
    engine = getattr(worker, "checkpoint_engine", None)
    if engine is None:
        return
    setattr(engine, _OFFER, _offered)
    if session.active_config().sync == "delta" and hasattr(engine, "multi_sender"):
        engine.multi_sender = False


def _offered(held: str) -> None:
    WORKER.held = held


def choose_base(source: Source) -> None:
    """Set the base of a sync before its stream is read. Over a checkpoint engine only rank 0 sends and needs one."""
    import torch.distributed as dist

    if source.base is not None and WORKER.separate:
        if dist.get_rank() == 0:
            source.base.offer(WORKER.held)
        else:
            source.base = None
    WORKER.base = source.base


def greeted(held: str) -> None:
    """Take the reply of a colocated engine, before the stream is read."""
    if WORKER.base is not None and not WORKER.separate:
        WORKER.base.offer(held)


# ---- The sync ----
# ``ActorRolloutRefWorker.update_weights`` → ``FSDPEngine.get_per_tensor_param`` → ``ServerAdapter.update_weights`` →
# verl's own buckets → ``transport.update_weights_from_ipc`` in the vLLM worker.

@replacement
def init_model(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap ``ActorRolloutRefWorker.init_model``: require a patched trainer loop with the same settings."""
    rollout = self.config.rollout
    custom = rollout.get("custom", None) or {}
    check_mark(dict(custom.get(MARK, None) or {}))
    if session.active_config().quantized_rollout:
        WORKER.rollout_tp = int(rollout.tensor_model_parallel_size)
        WORKER.rollout_ep = int(rollout.get("expert_parallel_size", None) or 1)
    result = original(self, *args, **kwargs)
    attach(self)
    return result


def check_mark(mark: dict[str, str]) -> None:
    """Compare this process's settings with those that the trainer loop stored in verl's configuration."""
    rules.check(
        mark,
        session.active_config(),
        "a training worker",
        "verl's trainer loop (the TaskRunner process) is not patched, but this worker is. Install jetrl_patch on its node, "
        "pass it the JETRL_* variables and do not exclude jetrl_patch in VERL_USE_EXTERNAL_PLUGINS.",
    )


@replacement
def get_per_tensor_param(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap an engine's ``get_per_tensor_param``: send FP8 bytes and scales instead of FP32 or BF16 weights."""
    weights, peft = original(self, *args, **kwargs)
    stats = WORKER.stats = SyncStats()
    if scales_loss():
        return until_broken(half_stream(weights, stats)), peft
    if not session.active_config().quantized_rollout:
        return until_broken(counted(weights, stats)), peft
    prepared = RECORD.get(self)
    if prepared is None:
        raise NotPatchedError(
            "the trainer's model was built before this process was patched. Call jetrl_patch.enable() before the model is built."
        )
    if peft is not None:
        what, fix = "weight sync to a quantized rollout", f"set model.lora.merge=True, or use {UNQUANTIZED}"
        raise ConflictError(explain(what, required="full weights, or merged ones", found="LoRA adapters", fix=fix))
    looks = prepared.monitor is not None and prepared.monitor.decides
    prepared.begin_sync(lambda: weights, WORKER.followers)
    again = original(self, *args, **kwargs)[0] if looks else weights
    choose_base(prepared)
    return until_broken(prepared.stream(again, stats)), None


def until_broken(weights: Iterable[Any]) -> Iterable[Any]:
    """Over a checkpoint engine, end a stream that breaks (NaN in a weight, …) early, and keep the error in ``WORKER.broken``.

    The receivers read without a time limit. They then find an incomplete sync and raise.
    """

    def stream() -> Iterator[Any]:
        try:
            yield from weights
        except Exception as error:
            WORKER.broken = error

    return stream() if WORKER.separate else weights


def counted(weights: Iterable[Any], stats: SyncStats) -> Iterator[Any]:
    """Pass the stream on unchanged, and count its bytes."""
    for name, tensor in weights:
        stats.total += tensor.nbytes
        stats.tensors += 1
        yield name, tensor


@replacement
async def server_update_weights(
    original: Any, self: Any, weights: Any, global_steps: int | None = None, wire_format: str = "named_tensors", **kwargs: Any
) -> None:
    """Replace ``ServerAdapter.update_weights``: the same steps, with a watched peer and a timeout."""
    if wire_format != "named_tensors":
        fix = "set checkpoint_engine.backend=naive"
        raise ConflictError(explain("weight sync", required="wire format 'named_tensors'", found=repr(wire_format), fix=fix))
    config, sync = session.active_config(), sync_id(WORKER, global_steps)
    call = await self._execute_method(
        "update_weights_from_ipc",
        non_block=True,
        kwargs={**kwargs, "use_shm": self.use_shm, "jetrl": config.to_env(), "jetrl_sync": sync},
    )
    peer = Peer(None if call is None else call.future(), config.sync_timeout)
    sender = watched_sender(
        peer,
        zmq_handle=own(self.zmq_handle, sync),
        bucket_size_mb=self.config.checkpoint_engine.update_weights_bucket_megabytes,
        use_shm=self.use_shm,
    )
    try:
        await sender.async_send_weights(ending_early(weights, sender, greeted))
        if peer.call is not None:
            await asyncio.wait_for(asyncio.wrap_future(peer.call), config.sync_timeout)
        if self._has_server:
            await self.server_handle.clear_kv_cache.remote()
            if global_steps is not None:
                await self.server_handle.set_global_steps.remote(global_steps)
    except TimeoutError as error:
        raise SyncError(
            f"the vLLM workers did not finish a weight sync within {config.sync_timeout:g} s. "
            "Check their logs, or raise JETRL_SYNC_TIMEOUT."
        ) from error
    except Exception as error:
        known = as_sync_error(error)
        if known is error:
            raise
        raise known from error


@replacement
async def worker_update_weights(original: Any, self: Any, global_steps: int | None = None, mode: str = "auto") -> Any:
    """Wrap ``ActorRolloutRefWorker.update_weights``: return a report of the sync and of the step that it ends."""
    start = time.perf_counter()
    backend = self.config.rollout.checkpoint_engine.backend if mode == "auto" else mode
    WORKER.separate, WORKER.broken = backend != "naive", None
    result = await original(self, global_steps=global_steps, mode=mode)
    if WORKER.broken is not None:
        raise WORKER.broken
    prepared = RECORD.get(self.actor.engine)
    report = {
        **sync_report(WORKER.stats or SyncStats(), start),
        **_compared(self.actor.engine),
        **routes.report(),
        **WORKER.loss_scale.figures(),
        "monitor": {} if prepared is None else prepared.end_sync(),  # collective; raises PrecisionError to stop the run
        "lines": [] if prepared is None else prepared.take_lines(),
    }
    return {**(result or {}), report_key(self.rank): report}


def _compared(engine: Any) -> dict[str, Any]:
    """Return what the losses compared since the last sync. Of ranks that share sequences, and so tokens, one reports the sums."""
    measured, audited = old_log_probs.take_measured(), WORKER.audit.report()
    if not engine.is_mp_src_rank_with_outputs():
        measured, audited = [], {**audited, "sums": None}
    return {old_log_probs.LOSS: measured, "audit": audited}
