"""The transports from a trainer's weights to an engine: the plugin's code on the frameworks' own transfers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from jetrl_patch.sync.send import NamedTensor, SyncStats
from jetrl_patch.trainer.source import Source, convert

Disturb = Callable[[Iterable[NamedTensor]], Iterator[NamedTensor]]


class Trainer:
    """A policy of two versions, and what a sync of it sends.

    Attributes:
        disturb: changes the messages of the next sync before they reach the framework's transfer.
    """

    def __init__(self, model: str, config: Any) -> None:
        from transformers import AutoModelForCausalLM

        self.config = config
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
        shapes = {name: tuple(p.shape) for name, p in self.model.named_parameters()}
        self.source: Source = convert(self.model, config, shapes, rollout_tp=1, device_type="cpu")
        first = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        generator = torch.Generator().manual_seed(1)
        # with other scales too, so that no tensor is equal in both versions
        second = {name: 3 * p + 0.05 * torch.randn(p.shape, generator=generator).to(p) for name, p in first.items()}
        self.versions = (first, second)
        self.disturb: Disturb = iter
        stream = self.source.stream
        self.source.stream = lambda weights, stats: self.disturb(stream(weights, stats))  # type: ignore[method-assign]

    def take(self, version: int) -> None:
        """Make this version the policy's weights."""
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(self.versions[version][name])

    def messages(self, version: int) -> list[NamedTensor]:
        """All messages of an undisturbed sync of this version."""
        self.take(version)
        disturb, self.disturb = self.disturb, iter
        try:
            return [(name, tensor.clone()) for name, tensor in self.source.stream(self.weights(), SyncStats())]
        finally:
            self.disturb = disturb

    def weights(self) -> Iterator[NamedTensor]:
        for name, parameter in self.model.named_parameters():
            yield name, parameter.data


class VerlIpc:
    """verl's colocated engine: ``ServerAdapter.update_weights`` over ZMQ and shared memory."""

    framework = "verl"

    def __init__(self, rollout: Any, trainer: Trainer) -> None:
        import ray

        from jetrl_patch.adapters.verl import sync

        handle = ray.get(rollout.call.remote("_get_zmq_handle"))
        self.trainer, self.rollout = trainer, rollout
        self.update = sync.server_update_weights(lambda *args, **kwargs: None)
        self.adapter = SimpleNamespace(
            _execute_method=self._execute,
            _has_server=True,
            config=SimpleNamespace(checkpoint_engine=SimpleNamespace(update_weights_bucket_megabytes=1)),
            server_handle=rollout,
            use_shm=True,
            zmq_handle=handle,
        )

    async def _execute(self, method: str, non_block: bool, kwargs: dict[str, Any]) -> Any:
        return self.rollout.call.remote(method, **kwargs)

    def sync(self) -> None:
        stream = self.trainer.source.stream(self.trainer.weights(), SyncStats())
        asyncio.run(self.update(self.adapter, stream, global_steps=1))


class Actor:
    """OpenRLHF's ``Actor``, whose model DeepSpeed has wrapped."""

    def __init__(self, module: Any) -> None:
        self.model = SimpleNamespace(module=module)


class OpenrlhfIpc:
    """OpenRLHF's colocated engines: ``broadcast_to_vllm`` over the orders' remote calls."""

    framework = "openrlhf"

    def __init__(self, rollout: Any, trainer: Trainer) -> None:
        import torch.distributed as dist

        from jetrl_patch.adapters.openrlhf.state import WORKER

        WORKER.version = 0  # of a new run, as its engine is
        if not dist.is_initialized():
            dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
        args = SimpleNamespace(ds=SimpleNamespace(zero_stage=0), vllm=SimpleNamespace(sync_with_ray=True))
        self.trainer = trainer
        self.actor = SimpleNamespace(
            actor=Actor(trainer.model),
            strategy=SimpleNamespace(args=args),
            use_cuda_ipc=True,
            vllm_engines=[rollout],
        )
        WORKER.sources[self.actor.actor] = trainer.source

    def sync(self) -> None:
        from jetrl_patch.adapters.openrlhf.sync import send

        send(self.actor, self.trainer.config, SyncStats())


ROADS = {"verl": VerlIpc, "openrlhf": OpenrlhfIpc}
