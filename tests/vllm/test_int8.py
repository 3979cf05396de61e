"""Scales per channel in a live engine: INT8 and FP8, from a BF16 checkpoint and from the trainer's own bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import jetrl_patch
from jetrl_patch import ConfigError, ModelError, SyncError
from jetrl_patch.backends import rowwise
from jetrl_patch.backends.rowwise import MAX_K, quantize_int8_rows
from jetrl_patch.measure.parity import Job
from jetrl_patch.models.layers import is_quantized
from jetrl_patch.sync.digest import digest
from jetrl_patch.sync.send import SyncStats
from jetrl_patch.trainer.source import Source, convert

from .test_settings import build
from .test_weights import in_engine, push, weights_of, worker_of

MODES: dict[str, dict[str, Any]] = {
    "int8": {"precision": "int8-rollout"},
    "int8 plain": {"precision": "int8-rollout", "smoothing": 0},
    "fp8": {"precision": "fp8-rollout", "rollout_granularity": "channel", "scale_format": "fp32"},
}


def by_hand(mode: str, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return rowwise.quantize_fp8_rows(weight, "fp32") if mode == "fp8" else quantize_int8_rows(weight)


def expected(mode: str, weights: dict[str, torch.Tensor], exclude: tuple[str, ...] = ()) -> dict[str, int]:
    found = {}
    for name, weight in weights.items():
        if weight.dim() == 2 and is_quantized(name.removesuffix(".weight"), exclude):
            q, s = by_hand(mode, weight)
            found[name], found[name + "_scale_inv"] = digest(q), digest(s)
    return found


def trainer(path: str) -> tuple[Any, Source]:
    """A model as a framework holds it, and what sends it."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    config = jetrl_patch.status().config
    assert config is not None
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    return model, convert(model, config, shapes, rollout_tp=1, device_type="cpu")


def sent(model: Any, source: Source, stats: SyncStats | None = None) -> list[Any]:
    source.begin_sync(model.named_parameters)
    return list(source.stream(model.named_parameters(), stats or SyncStats()))


@pytest.mark.e2e
@pytest.mark.parametrize("mode", ["int8", pytest.param("int8 plain", marks=pytest.mark.slow), "fp8"])
def test_bytes_in_the_engine(checkpoint: Callable[..., str], engine: Callable[..., Any], mode: str) -> None:
    """Widths that are not multiples of 128, and fused layers with a bias: first a BF16 checkpoint, then a push."""
    from jetrl_patch.adapters.vllm.sample import generate

    first, second = checkpoint("qwen2-odd"), checkpoint("qwen2-odd", seed=1)
    exclude = ("layers.1.mlp",)
    jetrl_patch.enable(**MODES[mode], exclude=exclude)
    llm = engine(Job(model=first, config=jetrl_patch.status().config))
    assert in_engine(llm) == expected(mode, weights_of(first), exclude)
    model, source = trainer(second)
    stats = SyncStats()
    items = sent(model, source, stats)
    pushed = {name: tensor.clone() for name, tensor in items}
    assert 0.5 < stats.quantized / stats.quantized_as_bf16 < 0.52 and stats.layers == 18
    receipt = push(worker_of(llm), items)
    assert receipt["layers"] == 18
    assert in_engine(llm) == {n: digest(t) for n, t in pushed.items() if n + "_scale_inv" in pushed or "_scale" in n}
    if mode != "int8":
        assert in_engine(llm) == expected(mode, weights_of(second), exclude)
    llm.reset_prefix_cache()
    assert all(torch.tensor(generate(llm, [[5, 6, 7]], 4, 1.0)[0].log_probs).isfinite())


@pytest.mark.e2e
def test_an_int8_layer_computes_the_reference(checkpoint: Callable[..., str], engine: Callable[..., Any]) -> None:
    from jetrl_patch.backends.rowwise import int8_fprop

    path = checkpoint("qwen2-odd")
    jetrl_patch.enable(precision="int8-rollout")
    llm = engine(Job(model=path, config=jetrl_patch.status().config))
    layer = worker_of(llm).model_runner.get_model().model.layers[0].self_attn.qkv_proj
    x = torch.randn(5, 320).to(torch.bfloat16)
    weights = weights_of(path)
    parts = []
    for part in ("q", "k", "v"):
        name = f"model.layers.0.self_attn.{part}_proj"
        y = int8_fprop(x, quantize_int8_rows(weights[name + ".weight"]))  # the reference product, in FP64
        parts.append(y + weights[name + ".bias"])
    assert torch.equal(layer(x)[0], torch.cat(parts, 1))


@pytest.mark.e2e
@pytest.mark.slow
def test_a_broken_push_stops_the_engine(checkpoint: Callable[..., str], engine: Callable[..., Any]) -> None:
    path = checkpoint("qwen3")
    jetrl_patch.enable(precision="int8-rollout")
    llm = engine(Job(model=path, config=jetrl_patch.status().config))
    worker = worker_of(llm)
    model, source = trainer(path)
    lost = "model.layers.1.mlp.down_proj.weight_scale_inv"
    with pytest.raises(SyncError, match=lost):
        push(worker, [item for item in sent(model, source) if item[0] != lost])
    with pytest.raises(SyncError, match="does not generate"):
        worker.execute_model(None)
    layer = worker.model_runner.get_model().model.layers[0].mlp.gate_up_proj
    assert bool(layer(torch.ones(1, 256, dtype=torch.bfloat16))[0].isnan().all()), "poison must be seen"
    push(worker, sent(model, source))
    name = "model.layers.2.self_attn.k_proj.weight"
    with torch.no_grad():
        model.get_parameter(name)[3, 4] = float("nan")
    with pytest.raises(SyncError, match=rf"{name} holds NaN or Inf"):
        sent(model, source)


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["int8", "fp8"])
def test_bytes_on_two_ranks(
    checkpoint: Callable[..., str], engine: Callable[..., Any], tmp_path: Any, mode: str
) -> None:
    """Row-parallel slices keep the scale of the whole row; both ranks hold it, and it counts once."""
    from .test_parallel import receive

    first, second = checkpoint("qwen2"), checkpoint("qwen2", seed=1)
    jetrl_patch.enable(**MODES[mode])
    llm = engine(Job(model=first, config=jetrl_patch.status().config, tp=2))
    model, source = trainer(second)
    items = sent(model, source)
    torch.save(items, tmp_path / "stream")
    assert len(llm.collective_rpc(receive, args=(str(tmp_path / "stream"),))) == 2
    pieces = {tuple(piece) for report in llm.collective_rpc("jetrl_report") for piece in report["digests"]}
    found: dict[str, int] = {}
    for name, *_, value in pieces:
        found[name] = (found.get(name, 0) + value) % 2**64
    assert found == {name: digest(tensor) for name, tensor in items if name in found} and len(found) == 42


def test_vllm_knows_it_by_its_own_name(checkpoint: Callable[..., str]) -> None:
    jetrl_patch.enable(precision="int8-rollout")
    found = build(checkpoint("qwen3"))
    assert found.model_config.quantization == "jetrl_int8"
    assert build(checkpoint("qwen3"), tensor_parallel_size=4) is not None  # one scale per row: nothing is cut
    jetrl_patch.disable()
    import vllm.model_executor.layers.quantization as quantization

    assert "jetrl_int8" not in quantization.QUANTIZATION_METHODS


def test_pieces_of_a_row_wise_scale_tile_the_whole() -> None:
    """Two column-parallel ranks hold different rows; two row-parallel ranks hold the same rows."""
    from jetrl_patch.adapters.vllm.formats import RowScales
    from jetrl_patch.adapters.vllm.shards import Shard
    from jetrl_patch.sync.digest import Pieces, Rect
    from jetrl_patch.sync.receive import check_tiling

    def row_scales(shard: Shard, scale: torch.Tensor) -> list[Rect]:
        pieces = Pieces()
        RowScales().add_to(pieces, shard, scale)
        return list(pieces.read())

    scale = torch.rand(10, 1)
    apart = [Shard("m", "q", 10, a, b, 0, 6, 0) for a, b in ((0, 4), (4, 10))]
    rects = [rect for s in apart for rect in row_scales(s, scale[s.row0 : s.row1])]
    check_tiling("m.weight_scale_inv", (10, 1), digest(scale), rects)
    alike = [Shard("m", None, 10, 0, 10, a, b, 0) for a, b in ((0, 3), (3, 6))]
    rects = [rect for s in alike for rect in row_scales(s, scale)]
    check_tiling("m.weight_scale_inv", (10, 1), digest(scale), rects)
    with pytest.raises(SyncError, match="two ranks hold rows 0:10 with different bytes"):
        check_tiling("m.weight_scale_inv", (10, 1), digest(scale), [*rects[:1], *row_scales(alike[1], scale + 1)])


def test_what_int8_cannot_take() -> None:
    from jetrl_patch.backends.rowwise import check_width

    with pytest.raises(ConfigError, match=r"align='exact' contradicts precision='int8-rollout'"):
        jetrl_patch.enable(precision="int8-rollout", align="exact")
    check_width("a.down_proj", MAX_K)
    with pytest.raises(ModelError, match=r"a\.down_proj: required .* fits in int32.*exclude=\['down_proj'\]"):
        check_width("a.down_proj", MAX_K + 1)


@pytest.mark.e2e
@pytest.mark.slow
def test_smoothing_brings_the_rollout_nearer_to_the_trainer(tmp_path: Any, engine: Callable[..., Any]) -> None:
    """A model with outlier channels: real samples of one engine, pushed plain and smoothed, scored by the BF16 trainer."""
    from jetrl_patch.adapters.vllm.sample import generate
    from jetrl_patch.cli.parity.score import score
    from jetrl_patch.config import Config
    from tests.scaling.test_smoothing import IDS, with_outliers

    with_outliers(size=30.0).save_pretrained(tmp_path)
    jetrl_patch.enable(precision="int8-rollout")
    job = Job(model=str(tmp_path), config=Config(precision="int8-rollout").resolved())
    llm = engine(job)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    errors = {}
    for smoothing in (0.0, 0.5):
        config = Config(precision="int8-rollout", smoothing=smoothing)
        source = convert(model, config, shapes, rollout_tp=1, device_type="cpu")
        push(worker_of(llm), sent(model, source))
        with torch.no_grad():
            model(input_ids=IDS)  # what training would show
        push(worker_of(llm), sent(model, source))
        llm.reset_prefix_cache()
        samples = generate(llm, [[5 + i, 9, 40 + i] for i in range(32)], 16, 1.0)
        rollout = torch.tensor([value for sample in samples for value in sample.log_probs])
        errors[smoothing] = (score(job, samples).log_probs - rollout).abs().mean().item()
    print("mean |Δlogp|", errors)
    assert errors[0.5] < 0.8 * errors[0.0], errors
