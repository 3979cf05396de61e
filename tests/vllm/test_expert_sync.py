"""A weight sync of a mixture to a live engine: the trained bytes serve, and a lost expert is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import jetrl_patch
from jetrl_patch import SyncError
from jetrl_patch.measure.parity import Job
from jetrl_patch.sync.send import SyncStats
from jetrl_patch.trainer.source import Source, convert

from ..models import corrections
from .test_exact import assert_equal, prompts_of
from .test_weights import push, weights_of, worker_of

pytestmark = pytest.mark.e2e
LOST = "model.layers.2.mlp.experts.3.up_proj.weight_scale_inv"


def trainer(path: str, config: Any) -> tuple[Any, Source]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    return model, convert(model, config, shapes, rollout_tp=1, device_type="cpu")


def step(model: Any) -> None:
    ids = torch.randint(2, 384, (4, 40), generator=torch.Generator().manual_seed(3))
    model.train()(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.02 * p.grad / (p.grad.float().norm() + 1e-6) * p.float().norm()
        for _, buffer in corrections(model):
            buffer += 0.1 * torch.randn(buffer.shape, generator=torch.Generator().manual_seed(5))
    model.eval()


@pytest.mark.parametrize(
    ("variant", "layers"),
    [
        ("qwen3_moe-odd", 3 * (4 + 5 * 3)),
        pytest.param("olmoe-odd", 3 * (4 + 5 * 3), marks=pytest.mark.slow),
        ("qwen2_moe-odd", 2 * (4 + 3 + 5 * 3) + 4 + 3),
        ("mixtral-odd", 3 * (4 + 5 * 3)),
        ("glm4_moe-odd", 2 * (4 + 3 + 5 * 3) + 4 + 3),
    ],
)
def test_a_trained_mixture_serves_the_trainers_bits(
    checkpoint: Callable[..., str], engine: Callable[..., Any], tmp_path: Path, variant: str, layers: int
) -> None:
    from jetrl_patch.adapters.vllm.sample import generate

    path = checkpoint(variant)
    jetrl_patch.enable(precision="fp8-unified")
    config = jetrl_patch.status().config
    llm = engine(Job(model=path, config=config, engine=(("load_format", "dummy"),)))
    worker = worker_of(llm)
    model, source = trainer(path, config)
    step(model)
    stats = SyncStats()
    items = list(source.stream(((n, p.detach()) for n, p in model.named_parameters()), stats))
    assert push(worker, items)["layers"] == stats.layers == len(source.layers) == layers
    assert stats.quantized <= 0.52 * stats.quantized_as_bf16

    samples = generate(llm, prompts_of(7, (1, 40)), 12, 1.0) + generate(llm, prompts_of(1, (5, 9)), 12, 1.0)
    model.save_pretrained(tmp_path)
    assert_equal(Job(model=str(tmp_path), config=config), samples, tokens=96)

    with pytest.raises(SyncError, match=LOST.replace(".", r"\.")):
        push(worker, [item for item in items if item[0] != LOST])
    with pytest.raises(SyncError, match="does not generate"):
        worker.execute_model(None)
    for name in source.buffers:  # no parameter of the trainer, so that a framework may leave it out
        with pytest.raises(SyncError, match=name.replace(".", r"\.")):
            push(worker, [item for item in items if item[0] != name])
    push(worker, items)
    assert_equal(Job(model=str(tmp_path), config=config), generate(llm, prompts_of(2, (3, 9)), 8, 1.0), tokens=16)


def test_bf16_experts_are_packed_again(checkpoint: Callable[..., str], engine: Callable[..., Any]) -> None:
    """As verl's own sync does it: a plain load, then vLLM's processing of what was loaded."""
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    from jetrl_patch.adapters.vllm.sample import generate

    def said(llm: Any) -> list[tuple[list[int], list[float]]]:
        return [(s.response, s.log_probs) for s in generate(llm, [[5, 6, 7, 8], [9, 10]], 6, 0.0)]

    first, second = checkpoint("qwen3_moe"), checkpoint("qwen3_moe", seed=1)
    jetrl_patch.enable(precision="bf16")
    config = jetrl_patch.status().config
    fresh = said(engine(Job(model=second, config=config)))
    llm = engine(Job(model=first, config=config))
    worker = worker_of(llm)
    for path in (first, second, second):
        worker.model_runner.get_model().load_weights(weights_of(path).items())
        process_weights_after_loading(worker.model_runner.get_model(), worker.vllm_config.model_config, worker.device)
        llm.reset_prefix_cache()
        assert (said(llm) == fresh) == (path == second)
