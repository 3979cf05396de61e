"""The weight sync: the policy's bytes and scales go to the engine in this process, or to a server."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator
from typing import Any

from jetrl_patch import loop, session
from jetrl_patch.adapters.trl import model, settings
from jetrl_patch.adapters.trl.server import Server
from jetrl_patch.adapters.trl.state import BUILDING, RUNS, Run, run_of
from jetrl_patch.fp8.lora import merged_parameters
from jetrl_patch.patching.patch import replacement
from jetrl_patch.sync.send import NamedTensor, SyncStats
from jetrl_patch.trainer.audit import sync_report


@replacement
def iter_named_params(original: Any, self: Any) -> Iterator[NamedTensor]:
    """Wrap ``VLLMGeneration._iter_named_params``, whose weights ``sync_weights`` loads into the engine one by one.

    It sends them itself and leaves ``sync_weights`` the rest: waking the engine up, and dropping cached prefixes.
    """
    run = run_of(self)
    assert run.source is not None, "the policy was converted before its engine was built"
    weights = functools.partial(original, self)
    if adapters := run.source.adapters:
        weights = functools.partial(merged_parameters, self.model, adapters, functools.partial(gathered, self))
    send(run, self, weights)
    return iter(())


@replacement
def sync_weights(original: Any, self: Any) -> None:
    """Wrap ``VLLMGeneration.sync_weights``, which for a server goes through the weights twice, first for their shapes."""
    if self.mode != "server":
        original(self)
        return
    self._iter_named_params()
    if self.accelerator.is_main_process:
        self.vllm_client.reset_prefix_cache()


@replacement
def init_communicator(original: Any, self: Any, device: Any = 0) -> None:
    """Replace ``VLLMClient.init_communicator``, which TRL calls on its main rank: meet the server before the first step."""
    import torch

    config, trainer = session.active_config(), BUILDING.trainer
    if trainer is None:
        raise settings.unsupported(model.caller(), config)
    run = RUNS[trainer]
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    run.server = Server(self, device, run.args.vllm_tensor_parallel_size, config)


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
