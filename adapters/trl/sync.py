"""The weight sync: the policy's bytes and scales go to the engine in this process, or to a server."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterable, Iterator
from typing import Any

from jetrl_patch import loop, session
from jetrl_patch.adapters.trl import model, settings
from jetrl_patch.adapters.trl.state import BUILDING, RUNS, Run, run_of
from jetrl_patch.fp8.lora import merged_parameters
from jetrl_patch.patching.patch import replacement
from jetrl_patch.sync.send import NamedTensor, SyncStats, half_stream
from jetrl_patch.trainer.audit import sync_report
from jetrl_patch.trainer.precision import scales_loss
from jetrl_patch.trainer.server import Server


@replacement
def iter_named_params(original: Any, self: Any) -> Iterator[NamedTensor]:
    """Wrap ``VLLMGeneration._iter_named_params``, whose weights ``sync_weights`` loads into the engine one by one.

    It sends a quantized rollout's itself and leaves ``sync_weights`` the rest: waking the engine up, dropping cached prefixes.
    """
    run = run_of(self)
    if scales_loss():
        return halved(original(self), run)
    assert run.source is not None, "the policy was converted before its engine was built"
    weights = functools.partial(original, self)
    if adapters := run.source.adapters:
        weights = functools.partial(merged_parameters, self.model, adapters, functools.partial(gathered, self))
    send(run, self, weights)
    return iter(())


@replacement
def sync_weights(original: Any, self: Any) -> None:
    """Wrap ``VLLMGeneration.sync_weights``, which for a server goes through the weights twice, first for their shapes."""
    if self.mode == "server":
        self._iter_named_params()
    else:
        original(self)


@replacement
def init_communicator(original: Any, self: Any, device: Any = 0) -> None:
    """Replace ``VLLMClient.init_communicator``, which TRL calls on its main rank: meet the server before the first step."""
    if (trainer := BUILDING.trainer) is None:
        raise settings.unsupported(model.caller(), session.active_config())
    run, setting = RUNS[trainer], "vllm_tensor_parallel_size"
    place = f"cuda:{device}" if isinstance(device, int) else device
    run.server = Server(self.base_url, self.group_port, rollout_tp=getattr(run.args, setting), device=place, setting=setting)


def halved(weights: Iterable[NamedTensor], run: Run) -> Iterator[NamedTensor]:
    """The weights of a sync in half precision. Raises SyncError for one that does not fit."""
    start, stats = time.perf_counter(), SyncStats()
    yield from half_stream(weights, stats)
    run.synced.append(sync_report(stats, start) | {"monitor": {}})


@contextlib.contextmanager
def gathered(generation: Any, parts: list[Any]) -> Iterator[list[Any]]:
    """Whole tensors of parameters that ZeRO-3 or FSDP2 has sharded, on every rank."""
    with generation._dist.gather_params(parts):
        yield [part.full_tensor() if generation._dist.is_fsdp else part.data for part in parts]


def send(run: Run, generation: Any, weights: Any) -> None:
    """Run one sync, on every rank. ``weights`` returns an iterator over all weights by their Hugging Face names.

    Raises SyncError or AuditError; the engine then no longer generates.
    """
    source, start, stats = run.source, time.perf_counter(), SyncStats()
    assert source is not None
    sends = generation.mode == "colocate" or run.server is not None
    source.begin_sync(weights, run.followers, quantizes=sends)
    if not sends:
        for _ in weights():  # every rank takes part in the gather
            pass
    elif run.server is not None:
        run.server.install(source.stream(weights(), stats))
    else:
        generation.llm.collective_rpc(loop.receive, args=(source.stream(weights(), stats),))
    run.synced.append(sync_report(stats, start) | {"monitor": source.end_sync()})
