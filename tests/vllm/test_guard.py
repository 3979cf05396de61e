"""Layers that leave FP8 in a live engine: the engine then equals one that never had them in FP8."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import jetrl_patch
from jetrl_patch import AuditError, SyncError
from jetrl_patch.errors import ModelError
from jetrl_patch.fp8.convert import per_expert
from jetrl_patch.measure.parity import Job
from jetrl_patch.models.layers import is_quantized
from jetrl_patch.sync.digest import digest
from jetrl_patch.sync.send import SyncStats, quantized_stream
from tests.vllm.test_exact import assert_equal, prompts_of
from tests.vllm.test_weights import in_engine, push, weights_of, worker_of

BLOCK0 = "model.layers.0"
QKV = [f"{BLOCK0}.self_attn.{n}_proj" for n in "qkv"]
GUARDED = [*QKV, f"{BLOCK0}.mlp.down_proj"]
EXPERTS = [f"{BLOCK0}.mlp.experts.{expert}.{part}_proj" for expert in range(5) for part in ("gate", "up", "down")]


def stream(path: str, terms: Any, guarded: list[str]) -> list[Any]:
    weights = dict(pair for item in weights_of(path).items() for pair in per_expert(*item))
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
@pytest.mark.parametrize(
    ("variant", "align", "guarded", "excluded", "units"),
    [
        ("qwen2", "exact", GUARDED, GUARDED, 4),
        ("llama-odd", "linear", GUARDED, GUARDED, 4),
        ("qwen3_moe-odd", "exact", [*QKV, *EXPERTS], [*QKV, "layers.0.mlp.experts"], 4),
        pytest.param("mixtral-odd", "linear", EXPERTS, ["layers.0.mlp"], 1, marks=pytest.mark.slow),
    ],
)
def test_it_computes_as_if_they_had_never_been_fp8(
    checkpoint: Callable[..., str],
    engine: Callable[..., Any],
    variant: str,
    align: Any,
    guarded: list[str],
    excluded: list[str],
    units: int,
) -> None:
    from jetrl_patch.adapters.vllm.sample import generate

    first, second = checkpoint(variant), checkpoint(variant, seed=1)
    prompts = [[5, 6, 7, 8], [9, 10]]
    jetrl_patch.enable(precision="fp8-unified", align=align, exclude=tuple(excluded))
    wanted = generate(engine(Job(model=second, config=jetrl_patch.status().config)), prompts, 6, 0.0)
    jetrl_patch.disable()

    jetrl_patch.enable(precision="fp8-unified", align=align)
    llm = engine(Job(model=first, config=jetrl_patch.status().config))
    worker = worker_of(llm)
    terms = worker.jetrl_receiver.terms
    push(worker, stream(second, terms, []))
    assert generate(llm, prompts, 6, 0.0) != wanted
    for path in (first, second):  # the second time there is nothing left to change, only to load
        push(worker, stream(path, terms, guarded))
    llm.reset_prefix_cache()
    assert generate(llm, prompts, 6, 0.0) == wanted

    found = in_engine(llm)
    sent = dict(pair for item in weights_of(second).items() for pair in per_expert(*item))
    for name in guarded:
        assert found[name + ".weight"] == digest(sent[name + ".weight"])
        assert name + ".weight_scale_inv" not in found
    (report,) = llm.collective_rpc("jetrl_report")
    assert report["guarded"] == sorted(guarded) and not set(guarded) & set(report["layers"])
    assert set(jetrl_patch.status().guarded) == set(guarded)
    (line,) = [line for line in str(jetrl_patch.status()).splitlines() if "guarded" in line]
    assert f"{len(guarded)} in BF16 by the precision guard" in line and line.count("model.layers.0.") == units

    with pytest.raises(AuditError, match=r"only in the trainer: model\.layers\.0"):  # a guard never goes back
        push(worker, stream(second, terms, []))


@pytest.mark.e2e
def test_experts_are_exact_where_exclude_leaves_a_block_in_bf16(
    checkpoint: Callable[..., str], engine: Callable[..., Any], tmp_path: Path
) -> None:
    """Loaded from a checkpoint, and after a sync of what a trainer made of it; then without one of the BF16 weights."""
    from jetrl_patch.adapters.vllm.sample import generate
    from tests.vllm.test_expert_sync import step, trainer

    path = checkpoint("qwen3_moe-odd")
    jetrl_patch.enable(precision="fp8-unified", exclude=("layers.1.mlp.experts",))
    config = jetrl_patch.status().config
    job = Job(model=path, config=config)
    llm = engine(job)
    assert_equal(job, generate(llm, prompts_of(5, (1, 40)), 12, 1.0), tokens=60)
    model, source = trainer(path, config)
    step(model)
    items = list(source.stream(((n, p.detach()) for n, p in model.named_parameters()), SyncStats()))
    worker = worker_of(llm)
    assert push(worker, items)["layers"] == 3 * (4 + 5 * 3) - 5 * 3
    model.save_pretrained(tmp_path)
    assert_equal(Job(model=str(tmp_path), config=config), generate(llm, prompts_of(5, (1, 40)), 12, 1.0), tokens=60)
    lost = "model.layers.1.mlp.experts.3.up_proj.weight"
    with pytest.raises(SyncError, match=lost.replace(".", r"\.")):
        push(worker, [item for item in items if item[0] != lost])


@pytest.mark.e2e
def test_ill_experts_leave_fp8_on_both_sides_at_one_sync(
    checkpoint: Callable[..., str], engine: Callable[..., Any], tmp_path: Path
) -> None:
    """The trainer's guard decides, the engine follows, and log-probs are those of a run that had excluded them."""
    from jetrl_patch.adapters.vllm.sample import generate
    from tests.vllm.test_expert_sync import trainer

    path = checkpoint("qwen3_moe-odd")
    jetrl_patch.enable(precision="fp8-unified", monitor_every=1, guard_sqnr=20.0)
    config = jetrl_patch.status().config
    llm = engine(Job(model=path, config=config))
    worker = worker_of(llm)
    model, source = trainer(path, config)
    experts = model.model.layers[0].mlp.experts
    with torch.no_grad():
        experts.gate_up_proj[3, 200:][[3, 7]] *= 1e5
        experts.down_proj[3][:, [3, 7]] = 0

    def weights() -> Any:
        return ((name, p.detach()) for name, p in model.named_parameters())

    source.begin_sync(weights)
    assert push(worker, list(source.stream(weights(), SyncStats())))["layers"] == 3 * (4 + 5 * 3) - 5 * 3
    assert source.end_sync()["jetrl/guard_layers"] == 1
    assert any(line.endswith(" dB in 3.up_proj") for line in source.take_lines())
    (report,) = llm.collective_rpc("jetrl_report")
    assert report["guarded"] == sorted(EXPERTS) == sorted(source.guarded)
    model.save_pretrained(tmp_path)
    excluded = config.replace(guard_sqnr=None, exclude=("layers.0.mlp.experts",))
    assert_equal(Job(model=str(tmp_path), config=excluded), generate(llm, prompts_of(5, (1, 40)), 12, 1.0), tokens=60)


@pytest.mark.e2e
@pytest.mark.parametrize("pattern", ["experts.3", "layers.0.mlp.experts.*.down_proj"])
def test_some_experts_of_a_block_are_refused(
    checkpoint: Callable[..., str], engine: Callable[..., Any], pattern: str
) -> None:
    jetrl_patch.enable(precision="fp8-unified", exclude=(pattern,))
    with pytest.raises(ModelError, match=r"required all 15 matrices of model\.layers\.0\.mlp\.experts in FP8 or none"):
        engine(Job(model=checkpoint("qwen3_moe-odd"), config=jetrl_patch.status().config))


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
