"""The trainer's side of the weight sync in OpenRLHF: what is sent, by whom, and what is reported."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jetrl_patch import session
from jetrl_patch.adapters.openrlhf import settings, vision
from jetrl_patch.adapters.openrlhf.startup import ask_actors
from jetrl_patch.adapters.openrlhf.state import DRIVER, START, WORKER
from jetrl_patch.adapters.openrlhf.transport import IpcWire, RayOrders, broadcast
from jetrl_patch.config import Config
from jetrl_patch.errors import NotPatchedError
from jetrl_patch.patching.patch import replacement
from jetrl_patch.sync.delta import held_by
from jetrl_patch.sync.orders import GroupWire, Wire, send_all, where
from jetrl_patch.sync.send import NamedTensor, SyncStats, pack
from jetrl_patch.trainer.audit import sync_report
from jetrl_patch.trainer.ranks import require_same_workers

# ---- The precision guard: the policy actors decide, the reference model follows ---
# Before a sync the guard decides from the figures of all ranks, every rank applies the decision, and the sync announces it. The
# trainer loop reads it in the sync's report and tells the reference model's actors.

def tell(trainer: Any, guarded: Sequence[str]) -> None:
    """In the trainer loop, move the reference model's layers to BF16 in the same step as the policy's."""
    new = [name for name in guarded if name not in DRIVER.guarded]
    if new and trainer.reference_model_group is not None:
        ask_actors(trainer.reference_model_group, {"to_bf16": new})
    DRIVER.guarded += new


# ---- The trainer's side of the weight sync in OpenRLHF: what is sent, by whom, and what is reported
# ``ActorPPOTrainer.broadcast_to_vllm`` runs on every rank and sends buckets through ``transport.py``. The first sync runs when
# the trainer is built, so both sides are compared before the first rollout.

@replacement
def trainer_init(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """Wrap ``ActorPPOTrainer.__init__``: sync the trainer's bytes to the engines before they sample."""
    original(self, *args, **kwargs)
    if self.vllm_engines is None or not session.active_config().quantized_rollout:
        return
    asleep = bool(self.args.vllm.enable_sleep)
    if asleep:
        _on_engines(self, "wake_up", tags=["weights"])
    self.broadcast_to_vllm()
    WORKER.report = None  # the trainer loop does not ask for this report
    if asleep:
        _on_engines(self, "sleep")


@replacement
def broadcast_to_vllm(original: Any, self: Any) -> None:
    """Replace ``ActorPPOTrainer.broadcast_to_vllm``. Without a quantized rollout, run OpenRLHF's own and record its cost."""
    config = session.active_config()
    if WORKER.report is not None:
        raise NotPatchedError(
            f"the report of the last weight sync was never read, so OpenRLHF's trainer loop is not patched. {START}"
        )
    stats, start, monitor = SyncStats(), time.perf_counter(), {}
    if config.quantized_rollout:
        calls, source = send(self, config, stats), WORKER.sources[self.actor]
        monitor = source.end_sync()  # collective; raises PrecisionError to stop the run
        WORKER.lines += source.take_lines()
    else:
        settings.check_weights(self.actor.model.module)
        calls = _count_plain(self, stats)
        original(self)
    WORKER.report = {
        **sync_report(stats, start),
        "sync_calls": calls,
        **WORKER.loss_scale.figures(),
        "monitor": monitor,
        "audit": WORKER.audit.report(),
        "unfinished": is_unfinished(self.actor.model, self.strategy.args),
    }
    if config.skips_old_pass:
        WORKER.synced_at = self.actor.model.global_steps


def is_unfinished(engine: Any, args: Any) -> bool:
    """Whether DeepSpeed holds gradients of samples that did not fill an update: the next step's first update begins with them.

    With dynamic batches OpenRLHF tells DeepSpeed itself where an update ends.
    """
    return not args.train.dynamic_batch_enable and engine.micro_steps % engine.gradient_accumulation_steps() > 0


def send(trainer: Any, config: Config, stats: SyncStats) -> int:
    """Run one sync, on every rank. Return the number of this rank's remote calls to engines.

    Raises SyncError, AuditError, NotPatchedError or ConflictError; the engines then no longer generate.
    """
    import torch
    import torch.distributed as dist
    from openrlhf.utils.distributed_util import torch_dist_barrier_and_cuda_sync

    source = WORKER.sources.get(trainer.actor)
    if source is None:
        raise NotPatchedError(f"the trainer's model was built before this process was patched. {START}")
    torch.cuda.empty_cache()
    model = trainer.actor.model.module
    leads = dist.get_rank() == 0
    sends = leads or trainer.use_cuda_ipc
    stage = trainer.strategy.args.ds.zero_stage
    adapters = source.adapters or {}
    source.begin_sync(lambda: full_weights(model, stage, adapters), WORKER.followers, quantizes=sends)
    weights = full_weights(model, stage, adapters)
    orders = RayOrders(trainer.vllm_engines, config.sync_timeout)
    held = ""
    if leads:
        answers = orders.ask("begin", config=config.to_env())
        require_same_workers(list(itertools.chain.from_iterable(answers)), config, WORKER.version)
        held = held_by(answers)
    if source.base is not None and sends:
        told = [held]
        if trainer.use_cuda_ipc:  # all ranks send, so all must use the same base
            dist.broadcast_object_list(told, src=0)
        source.base.offer(told[0])
    if sends:
        wire: Wire = IpcWire(orders)
        if not trainer.use_cuda_ipc:  # with it, there is no group
            by_ray = bool(getattr(trainer.strategy.args.vllm, "sync_with_ray", False))
            wire = GroupWire(orders, functools.partial(broadcast, group=trainer._model_update_group, by_ray=by_ray))
        device = next(model.parameters()).device
        send_all(wire, pack(source.stream(weights, stats), device))
    else:
        for _ in weights:  # every rank takes part in the gather
            pass
    if leads:
        orders.ask("end", version=WORKER.version + 1)
        # cached prefixes were computed with the old weights
        orders.wait([engine.reset_prefix_cache.remote() for engine in trainer.vllm_engines])
    WORKER.version += 1
    torch.cuda.empty_cache()
    torch_dist_barrier_and_cuda_sync()
    return orders.calls


def full_weights(model: Any, zero_stage: int, adapters: Mapping[str, float]) -> Iterator[NamedTensor]:
    """Yield every whole parameter with its Hugging Face name. Each rank must exhaust the iterator.

    ZeRO-3 gathers a parameter when it is yielded and releases it afterwards. ``adapters`` as in ``Source``.
    """
    import deepspeed

    from jetrl_patch.fp8.lora import merged_parameters

    @contextlib.contextmanager
    def gathered(parts: list[Any]) -> Iterator[list[Any]]:
        with deepspeed.zero.GatheredParameters(parts, enabled=zero_stage == 3):
            yield [part.data for part in parts]

    return merged_parameters(model, adapters, gathered)


def report(self: Any, item: Any = None) -> dict[str, Any]:
    """``BaseModelActor.jetrl_report``, called through ``execute_batch``: identify the actor and report the last sync.

    Args:
        item: ``"sync"`` takes the metrics and log lines of the last sync, each once. ``{"to_bf16": [...]}`` names layers that the
            policy's precision guard moved to BF16, for the models that follow it.
    """
    if isinstance(item, dict):
        for source in WORKER.followers:
            source.to_bf16(item["to_bf16"])
    status = session.status()
    of_sync = {**(WORKER.report or {}), "lines": WORKER.lines} if item == "sync" else {}
    if of_sync:
        WORKER.report, WORKER.lines = None, []
    return {
        "pid": os.getpid(),
        "node": where(),
        "actor": type(self).__name__,
        "config": status.config.to_env() if status.config else {},
        "layers": len(status.layers) + len(status.guarded),
        "guarded": list(status.guarded),
        "version": WORKER.version,
        "patches": [[patch.target, patch.state] for patch in status.patches],
        **of_sync,
    }


def _count_plain(trainer: Any, stats: SyncStats) -> int:
    """Count the bytes of OpenRLHF's own sync; return its remote calls, one per parameter and engine."""
    for parameter in vision.synced(trainer.actor):
        stats.tensors += 1
        stats.total += int(getattr(parameter, "ds_numel", parameter.numel())) * parameter.element_size()
    return stats.tensors * len(trainer.vllm_engines)


def _on_engines(trainer: Any, method: str, **kwargs: Any) -> None:
    import torch.distributed as dist
    from openrlhf.trainer.ray.vllm_engine import batch_vllm_engine_call

    batch_vllm_engine_call(trainer.vllm_engines, method, **kwargs)  # rank 0 only
    dist.barrier()
