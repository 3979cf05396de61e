"""Delta syncs into a live engine: after each, every parameter holds the bytes that a full sync would leave."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
import torch

import jetrl_patch
from jetrl_patch import SyncError
from jetrl_patch.fp8.convert import per_expert
from jetrl_patch.measure.parity import Job
from jetrl_patch.models.layers import is_quantized
from jetrl_patch.sync.delta import PREFIX, Received, Sent
from jetrl_patch.sync.send import SyncStats, quantized_stream
from tests.vllm.test_weights import in_engine, push, weights_of, worker_of

pytestmark = pytest.mark.e2e

DOWN = "model.layers.1.mlp.down_proj.weight"


class Trainer:
    """A checkpoint's weights, moved a little by every update."""

    def __init__(self, path: str, terms: Any) -> None:
        apart = chain.from_iterable(per_expert(name, weight) for name, weight in weights_of(path).items())
        self.weights = {name: weight.float() for name, weight in apart}
        self.terms, self.base = terms, Sent()
        self.stats = SyncStats()
        self.generator = torch.Generator().manual_seed(3)

    def update(self, rate: float = 1e-4) -> None:
        for weight in self.weights.values():
            weight += rate * torch.randn(weight.shape, generator=self.generator).sign()

    def stream(self, base: Sent | None) -> list[Any]:
        names = [n.removesuffix(".weight") for n, w in self.weights.items() if w.dim() == 2]
        shapes = {name: tuple(w.shape) for name, w in self.weights.items()}
        self.stats = SyncStats()
        return list(
            quantized_stream(
                self.weights.items(), terms=self.terms, layers=[name for name in names if is_quantized(name, ())],
                shapes=shapes, stats=self.stats, base=base,
            )
        )  # fmt: skip

    def sync(self, worker: Any) -> list[Any]:
        self.base.offer(worker.jetrl_receiver.held())
        items = self.stream(self.base)
        push(worker, items)
        return items


def parameters(worker: Any) -> dict[str, torch.Tensor]:
    model = worker.model_runner.get_model()
    return {name: p.detach().clone().view(torch.uint8) for name, p in model.named_parameters()}


def assert_as_after_a_full_sync(worker: Any, trainer: Trainer, llm: Any) -> None:
    found, digests = parameters(worker), in_engine(llm)
    base, worker.jetrl_receiver.base = worker.jetrl_receiver.base, None
    push(worker, trainer.stream(None))
    worker.jetrl_receiver.base = base
    full = parameters(worker)
    assert found.keys() == full.keys() and digests == in_engine(llm)
    assert all(torch.equal(found[name], full[name]) for name in full)


@pytest.mark.parametrize("variant", ["qwen3", "qwen2-odd", "qwen3_moe"])
def test_twenty_syncs(checkpoint: Callable[..., str], engine: Callable[..., Any], variant: str) -> None:
    path = checkpoint(variant)
    jetrl_patch.enable(precision="fp8-unified", sync="delta")
    llm = engine(Job(model=path, config=jetrl_patch.status().config))
    worker = worker_of(llm)
    trainer = Trainer(path, worker.jetrl_receiver.terms)
    whole = 0
    for number in range(20):
        items = trainer.sync(worker)
        assert llm.collective_rpc("jetrl_report", args=(False,))[0]["held"] == trainer.base.identity
        assert any(name.startswith(PREFIX) for name, _ in items) == (number > 0)
        whole = whole or trainer.stats.total
        assert trainer.stats.full == whole and trainer.stats.total <= whole * (0.5 if number else 1)
        assert_as_after_a_full_sync(worker, trainer, llm)
        trainer.update()


def test_a_restarted_engine_and_a_broken_delta(checkpoint: Callable[..., str], engine: Callable[..., Any]) -> None:
    path = checkpoint("qwen3")
    jetrl_patch.enable(precision="fp8-unified", sync="delta")
    llm = engine(Job(model=path, config=jetrl_patch.status().config))
    worker = worker_of(llm)
    receiver = worker.jetrl_receiver
    trainer = Trainer(path, receiver.terms)
    trainer.sync(worker)

    trainer.update()
    receiver.base = Received()  # as in a process that has just started
    assert not any(name.startswith(PREFIX) for name, _ in trainer.sync(worker))
    assert_as_after_a_full_sync(worker, trainer, llm)

    trainer.update()
    trainer.base.offer(receiver.held())
    items = [(name, tensor.clone()) for name, tensor in trainer.stream(trainer.base)]
    record = dict(items)[PREFIX + DOWN]
    changes, symbols, width, _ = record[:16].view(torch.int32).tolist()
    assert changes > 0
    record[16 + width * symbols] ^= 1
    with pytest.raises(SyncError, match=f"changed on the way: {DOWN}"):
        push(worker, items)
    with pytest.raises(SyncError, match="does not generate"):
        worker.execute_model(None)

    assert not any(name.startswith(PREFIX) for name, _ in trainer.sync(worker))
    assert_as_after_a_full_sync(worker, trainer, llm)
    receiver.check_serving()
