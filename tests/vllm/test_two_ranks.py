"""Latent attention and gated delta nets over two ranks: after a weight sync each rank holds what a fresh engine's rank holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import jetrl_patch
from jetrl_patch.measure.parity import Job
from jetrl_patch.sync.send import SyncStats
from tests import models
from tests.fp8.thresholds import MISMATCH
from tests.vllm.test_delta_nets import off, trainer
from tests.vllm.test_latent import KINDS, MODES
from tests.vllm.test_split_experts import receive

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

#: family and its options; tensor parallelism would cut a block of experts that are 128 wide
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "latent": ("deepseek_v3", {**KINDS["compressed"], "moe_intermediate_size": 256}),
    "delta-nets": ("qwen3_next", {"moe_intermediate_size": 256}),
}
#: what vLLM makes of ``kv_b_proj``, in no list of parameters; with AMX the implementation of the attention holds it
MADE = ("W_UK_T", "W_UV", "_w_uk_packed", "_w_uv_packed")


def held(worker: Any) -> dict[str, str]:
    """Runs in each worker: hashes of all that it computes with, what is made of the weights included."""
    import hashlib

    model = worker.model_runner.get_model()
    found = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    for name, module in model.named_modules():
        for owner in (module, getattr(module, "impl", None)):
            found |= {f"{name}.{key}": getattr(owner, key) for key in MADE if getattr(owner, key, None) is not None}
    found = {name: tensor.detach().contiguous().flatten().view(torch.uint8) for name, tensor in found.items()}
    return {name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in found.items()}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[str]]:
    """Two checkpoints of a case: written before the first engine, which gives transformers vLLM's own configurations."""
    root = tmp_path_factory.mktemp("two-ranks")
    made = {
        case: [models.save(root / f"{case}-{seed}", family, seed, steps=0, **options) for seed in (0, 1)]
        for case, (family, options) in CASES.items()
    }
    return lambda case: made[case]


@pytest.mark.parametrize(("case", "mode"), [("latent", "linear"), ("latent", "exact"), ("delta-nets", "linear")])
def test_each_rank_serves_what_it_was_sent(
    folders: Callable[[str], list[str]], engine: Callable[..., Any], tmp_path: Path, case: str, mode: str
) -> None:
    from jetrl_patch.adapters.vllm.sample import generate

    jetrl_patch.enable(**MODES[mode])
    config = jetrl_patch.status().config
    first, second = folders(case)
    prompts = [list(range(3, 3 + length)) for length in (5, 70, 130)]

    def job(path: str) -> Job:
        return Job(model=path, config=config, tp=2)

    def answers(llm: Any) -> list[list[int]]:
        return [sample.response for sample in generate(llm, prompts, 24, 0.0)]

    fresh = engine(job(second), 256)
    expected, said = fresh.collective_rpc(held), answers(fresh)
    fresh.llm_engine.engine_core.shutdown()
    assert len(expected) == 2 and expected[0] != expected[1]

    llm = engine(job(first), 256)
    before = llm.collective_rpc(held)
    model, source = trainer(second, tp=2)
    assert set(llm.collective_rpc("jetrl_report")[0]["layers"]) == set(source.layers)
    torch.save(list(source.stream(model.state_dict().items(), SyncStats())), tmp_path / "stream")
    assert llm.collective_rpc(receive, args=(str(tmp_path / "stream"),)) == ["", ""]
    after = llm.collective_rpc(held)
    for rank in (0, 1):
        assert {name for name in expected[rank] if after[rank].get(name) != expected[rank][name]} == set()
        assert set(after[rank]) == set(expected[rank])
        made = {name for name in expected[rank] if name.endswith(MADE)}
        assert len(made) == (2 * 3 if case == "latent" else 0)
        assert all(before[rank][name] != expected[rank][name] for name in made)
    assert answers(llm) == said

    samples = generate(llm, prompts, 24, 1.0)
    old, _ = trainer(first, tp=2)
    same, other = off(model, samples), off(old, samples)
    print(f"mean abs Δlogp of {case}, {mode}, two ranks: {same:.4f}, of other weights {other:.2f}")
    assert same < MISMATCH[MODES[mode]["precision"]] and 4 * same < other, (same, other)
    if mode == "exact":
        assert same == 0.0
