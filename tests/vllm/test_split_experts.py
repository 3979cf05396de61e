"""Mixtures whose experts are split over two ranks of a real engine, by columns (TP) and by experts (EP), whole and synced."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import jetrl_patch
from jetrl_patch.measure.parity import Job
from jetrl_patch.sync.digest import digest
from jetrl_patch.sync.send import SyncStats
from jetrl_patch.trainer.source import convert

from .test_exact import apart, assert_equal, prompts_of, run
from .test_expert_sync import step

pytestmark = pytest.mark.e2e
TP: tuple[tuple[str, Any], ...] = ()
EP = (("enable_expert_parallel", True),)
LOST = "model.layers.2.mlp.experts.5.up_proj.weight_scale_inv"


def source_of(path: str, config: Any, job: Job) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    return model, convert(model, config, shapes, rollout_tp=job.tp, rollout_ep=job.ep, device_type="cpu")


def sent_by(model: Any, source: Any) -> list[tuple[str, torch.Tensor]]:
    return list(source.stream(((name, p.detach()) for name, p in model.named_parameters()), SyncStats()))


def receive(worker: Any, file: str, without: str = "") -> str:
    """Runs in each worker: the whole stream from a file, but for one tensor. Returns the error, if any."""
    import torch

    for item in torch.load(file):
        if item[0] != without:
            worker.jetrl_receiver.on_bucket([item])
    try:
        worker.jetrl_receiver.finish()
    except jetrl_patch.JetrlError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refusal(worker: Any) -> str:
    """Runs in each worker: why it does not generate."""
    try:
        worker.execute_model(None)
    except jetrl_patch.SyncError as error:
        return str(error)
    return ""


def digests(llm: Any) -> dict[str, int]:
    found: dict[str, int] = {}
    pieces = {tuple(piece) for report in llm.collective_rpc("jetrl_report") for piece in report["digests"]}
    for name, *_, value in pieces:  # a replica counts once
        found[name] = (found.get(name, 0) + value) % 2**64
    return found


@pytest.mark.parametrize(
    ("variant", "engine_settings"),
    [
        pytest.param("qwen3_moe-tp", TP, marks=pytest.mark.slow),
        ("qwen3_moe", EP),
        *(
            pytest.param(variant, settings, marks=pytest.mark.slow)
            for variant in ("qwen2_moe-tp", "glm4_moe-tp", "olmoe-tp", "mixtral-tp")
            for settings in (TP, EP)
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else ("EP" if value else "TP"),
)
def test_a_split_mixture_serves_the_trainers_bits(
    checkpoint: Callable[..., str], engine: Callable[..., Any], tmp_path: Path, variant: str, engine_settings: Any
) -> None:
    from jetrl_patch.adapters.vllm.sample import generate

    path = checkpoint(variant)
    jetrl_patch.enable(precision="fp8-unified")
    config = jetrl_patch.status().config
    job = Job(model=path, config=config, tp=2, engine=engine_settings)
    llm = engine(job)
    assert_equal(job, run(lambda _: llm, job, [(1, 1), (7, 1)], 12), tokens=96)

    model, source = source_of(path, config, job)
    step(model)
    items = sent_by(model, source)
    torch.save(items, tmp_path / "stream")
    assert llm.collective_rpc(receive, args=(str(tmp_path / "stream"),)) == ["", ""]
    layers = {f"{layer}.weight" for layer in source.layers}
    assert digests(llm) == {name: digest(t) for name, t in items if name.removesuffix("_scale_inv") in layers}
    samples = generate(llm, prompts_of(7, (1, 40)), 12, 1.0) + generate(llm, prompts_of(1, (5, 9)), 12, 1.0)
    model.save_pretrained(tmp_path / "trained")
    trained = Job(model=str(tmp_path / "trained"), config=config, tp=2, engine=engine_settings)
    assert_equal(trained, samples, tokens=96)

    errors = llm.collective_rpc(receive, args=(str(tmp_path / "stream"), LOST))
    assert all(error.startswith("SyncError: ") and LOST in error for error in errors)
    assert all("does not generate" in error for error in llm.collective_rpc(refusal))
    _, other = source_of(path, config, Job(model=path, config=config))
    torch.save(sent_by(model, other), tmp_path / "other")
    for error in llm.collective_rpc(receive, args=(str(tmp_path / "other"),)):
        assert error.startswith("AuditError: experts, whose sums") and "found no split in the trainer" in error
    assert llm.collective_rpc(receive, args=(str(tmp_path / "stream"),)) == ["", ""]
    assert_equal(trained, generate(llm, prompts_of(2, (3, 9)), 8, 1.0), tokens=16)


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "engine_settings"), [("qwen3_moe-tp", TP), ("qwen3_moe-tp", EP)], ids=["TP", "EP"])
def test_at_length(checkpoint: Callable[..., str], engine: Callable[..., Any], variant: str, engine_settings: Any) -> None:
    """2,500 tokens, of which a trainer that forms other groups gets some wrong."""
    jetrl_patch.enable(precision="fp8-unified")
    job = Job(model=checkpoint(variant), config=jetrl_patch.status().config, tp=2, engine=engine_settings)
    samples = run(engine, job, [(1, 2), (7, 1), (32, 1)], 64)
    assert_equal(job, samples, tokens=2500)
    other = Job(model=job.model, config=job.config, tp=2, engine=TP if engine_settings else EP)
    assert apart(other, samples).bit_equal_fraction < 1.0


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"precision": "fp8-unified", "align": "linear"}, {"precision": "fp8-rollout"}], ids=str)
@pytest.mark.parametrize(("variant", "engine_settings"), [("qwen3_moe-tp", TP), ("glm4_moe-tp", EP)])
def test_the_other_modes_are_close(
    checkpoint: Callable[..., str], engine: Callable[..., Any], variant: str, engine_settings: Any, settings: dict[str, Any]
) -> None:
    jetrl_patch.enable(**settings)
    job = Job(model=checkpoint(variant), config=jetrl_patch.status().config, tp=2, engine=engine_settings)
    assert 0 < apart(job, run(engine, job, [(16, 1)], 12)).logp_abs_diff_mean < 0.2
