"""Layers that leave FP8 in a live engine: the engine then equals one that never had them in FP8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import jetrl_patch
from jetrl_patch import AuditError
from jetrl_patch.fp8.layers import is_quantized
from jetrl_patch.parity.modes import Job
from jetrl_patch.sync.digest import digest
from jetrl_patch.sync.stream import SyncStats, quantized_stream
from tests.vllm.test_weights import in_engine, push, weights_of, worker_of

BLOCK0 = "model.layers.0"
GUARDED = [f"{BLOCK0}.self_attn.{n}_proj" for n in "qkv"] + [f"{BLOCK0}.mlp.down_proj"]


def stream(path: str, terms: Any, guarded: list[str]) -> list[Any]:
    weights = weights_of(path)
    layers = [n.removesuffix(".weight") for n, w in weights.items() if w.dim() == 2 and is_quantized(n[:-7], ())]
    return list(
        quantized_stream(
            weights.items(),
            terms=terms,
            layers=[layer for layer in layers if layer not in guarded],
            guarded=guarded,
            shapes={name: tuple(w.shape) for name, w in weights.items()},
            stats=SyncStats(),
        )
    )


@pytest.mark.e2e
@pytest.mark.parametrize(("variant", "align"), [("qwen2", "exact"), ("llama-odd", "linear")])
def test_it_computes_as_if_they_had_never_been_fp8(
    checkpoint: Callable[..., str], engine: Callable[..., Any], variant: str, align: Any
) -> None:
    from jetrl_patch.adapters.vllm.sample import generate

    first, second = checkpoint(variant), checkpoint(variant, seed=1)
    prompts = [[5, 6, 7, 8], [9, 10]]
    jetrl_patch.enable(precision="fp8-unified", align=align, exclude=tuple(GUARDED))
    wanted = generate(engine(Job(model=second, config=jetrl_patch.status().config)), prompts, 6, 0.0)
    jetrl_patch.disable()

    jetrl_patch.enable(precision="fp8-unified", align=align)
    llm = engine(Job(model=first, config=jetrl_patch.status().config))
    worker = worker_of(llm)
    terms = worker.jetrl_receiver.terms
    push(worker, stream(second, terms, []))
    assert generate(llm, prompts, 6, 0.0) != wanted
    for path in (first, second):  # the second time there is nothing left to change, only to load
        push(worker, stream(path, terms, GUARDED))
    llm.reset_prefix_cache()
    assert generate(llm, prompts, 6, 0.0) == wanted

    found = in_engine(llm)
    for name in GUARDED:
        assert found[name + ".weight"] == digest(weights_of(second)[name + ".weight"])
        assert name + ".weight_scale_inv" not in found
    (report,) = llm.collective_rpc("jetrl_report")
    assert report["guarded"] == sorted(GUARDED) and not set(GUARDED) & set(report["layers"])
    assert set(jetrl_patch.status().guarded) == set(GUARDED)
    assert "4 in BF16 by the precision guard" in str(jetrl_patch.status())

    with pytest.raises(AuditError, match=r"only in the trainer: model\.layers\.0"):  # a guard never goes back
        push(worker, stream(second, terms, []))


@pytest.mark.e2e
def test_a_part_of_a_fused_layer_is_refused_and_nothing_changes(
    checkpoint: Callable[..., str], engine: Callable[..., Any]
) -> None:
    path = checkpoint("qwen3")
    jetrl_patch.enable(precision="fp8-unified")
    llm = engine(Job(model=path, config=jetrl_patch.status().config))
    worker = worker_of(llm)
    before = worker.jetrl_receiver.installer.quantized_layers()
    alone = [f"{BLOCK0}.mlp.down_proj", f"{BLOCK0}.self_attn.q_proj"]
    with pytest.raises(AuditError, match="must change together"):
        push(worker, stream(path, worker.jetrl_receiver.terms, alone))
    assert worker.jetrl_receiver.installer.quantized_layers() == before
    assert llm.collective_rpc("jetrl_report", kwargs={"digests": False})[0]["state"] == "failed"
    assert bool(worker.model_runner.get_model().model.norm.weight.isnan().all())
    push(worker, stream(path, worker.jetrl_receiver.terms, []))
    assert torch.tensor(worker.model_runner.get_model().model.norm.weight.isfinite().all())
