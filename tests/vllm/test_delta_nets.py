"""Gated delta nets in vLLM: fused projections, packed convolutions and decays, and real engines of a mixture with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import jetrl_patch
from jetrl_patch import SyncError
from jetrl_patch.adapters.vllm.fixes import keep_live_weight, unpacked
from jetrl_patch.adapters.vllm.install import add_plain
from jetrl_patch.adapters.vllm.sample import generate
from jetrl_patch.adapters.vllm.shards import Shard, shards_of
from jetrl_patch.measure.parity import Job
from jetrl_patch.sync.digest import Pieces, add, digest
from jetrl_patch.sync.send import SyncStats
from jetrl_patch.trainer.source import Source, convert
from tests import models, vision_models
from tests.fp8.thresholds import MISMATCH
from tests.vllm.test_weights import in_engine, push, worker_of

MODES: dict[str, dict[str, Any]] = {
    "linear": {"precision": "fp8-unified", "align": "linear"},
    "fp8-rollout": {"precision": "fp8-rollout"},
}
NET = "model.layers.0.linear_attn"


@pytest.mark.parametrize("rank", [0, 1])
def test_one_weight_fills_three_parts_of_a_fused_layer(rank: int) -> None:
    """Of two ranks each holds half of q, of k, of v and of z; q, k and v are rows of one weight."""
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear

    layer = MergedColumnParallelLinear.__new__(MergedColumnParallelLinear)
    torch.nn.Module.__init__(layer)
    layer.tp_rank, layer.tp_size, layer.input_size, layer.output_sizes = rank, 2, 256, [128, 128, 256, 256]
    found = shards_of(layer, ["in_proj_qkv", "in_proj_z"])
    halves = [(64 * rank, 64), (128 + 64 * rank, 64), (256 + 128 * rank, 128)]
    expected = [Shard("in_proj_qkv", (0, 1, 2), 512, row, row + size, 0, 256, 0) for row, size in halves]
    offsets = (0, 64, 128)
    assert found[:3] == [Shard(**{**vars(s), "offset": at}) for s, at in zip(expected, offsets, strict=True)]
    assert found[3:] == [Shard("in_proj_z", 3, 256, 128 * rank, 128 * rank + 128, 0, 256, 256)]
    layer.prefix = "linear_attn.in_proj_qkvz"
    with pytest.raises(ValueError, match=r"in_proj_q, in_proj_z fill 2 of the 4 parts of linear_attn\.in_proj_qkvz"):
        shards_of(layer, ["in_proj_q", "in_proj_z"])


class Convolution(torch.nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(rows, 1, 4, dtype=torch.bfloat16), requires_grad=False)
        self.weight.weight_loader = lambda param, loaded: param.data.copy_(loaded)


def pack(layer: Any, remove_weight: bool) -> None:
    """As vLLM does on a CPU with BF16 products: other values in the place of the weight."""
    layer.weight.data = layer.weight.data.view(-1, 4).flip(0).contiguous()


def test_a_packed_convolution_is_packed_again_by_each_load() -> None:
    layer, dispatch = Convolution(6), keep_live_weight(pack)
    first, second = (torch.randn(6, 1, 4).bfloat16() for _ in range(2))
    layer.weight.weight_loader(layer.weight, first)
    dispatch(layer, True)
    assert torch.equal(unpacked(layer), first) and torch.equal(layer.weight, first.view(6, 4).flip(0))
    for loaded in (second, first):
        layer.weight.weight_loader(layer.weight, loaded)
        dispatch(layer, True)  # vLLM processes weights after a load once more; they are packed
        assert torch.equal(unpacked(layer), loaded) and torch.equal(layer.weight, loaded.view(6, 4).flip(0))


def test_a_convolution_that_is_not_packed_is_left_alone() -> None:
    layer = Convolution(6)
    load = layer.weight.weight_loader
    keep_live_weight(lambda layer, remove_weight: None)(layer, True)
    assert layer.weight.weight_loader is load and unpacked(layer) is layer.weight


class Net(torch.nn.Module):
    """What one of two ranks holds of a delta net with 2 heads for keys and 4 for values."""

    def __init__(self, rank: int, sent: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.tp_rank, self.tp_size, self.key_dim, self.value_dim = rank, 2, 8, 16
        half = slice(2 * rank, 2 * rank + 2)
        self.A_log = torch.nn.Parameter(sent["linear_attn.A_log"][half].float())  # vLLM holds it so
        self.dt_bias = torch.nn.Parameter(sent["linear_attn.dt_bias"][half].clone())
        q, k, v = sent["linear_attn.conv1d.weight"].split([8, 8, 16])
        rows = torch.cat([part.chunk(2)[rank] for part in (q, k, v)])
        self.conv1d = Convolution(len(rows))
        self.conv1d.weight.data = rows


def test_the_parts_of_two_ranks_make_up_what_was_sent() -> None:
    shapes = {"linear_attn.A_log": (4,), "linear_attn.dt_bias": (4,), "linear_attn.conv1d.weight": (32, 1, 4)}
    sent = {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}
    announced = {name: (shape, "bfloat16") for name, shape in shapes.items()}

    def held(nets: list[Net]) -> dict[str, int]:
        found: dict[str, int] = {}
        for net in nets:
            pieces, model = Pieces(), torch.nn.Module()
            model.linear_attn = net
            add_plain(pieces, model, announced)
            for rect in pieces.read():
                found[rect.name] = add(found.get(rect.name, 0), rect.digest)
        return found

    nets = [Net(rank, sent) for rank in (0, 1)]
    assert held(nets) == {name: digest(tensor) for name, tensor in sent.items()}
    nets[1].conv1d.weight.data[0, 0, 0] += 1
    assert held(nets)["linear_attn.conv1d.weight"] != digest(sent["linear_attn.conv1d.weight"])
    nets[1].A_log.data[0] += 1e-4  # less than BF16 tells apart
    with pytest.raises(SyncError, match=r"linear_attn\.A_log: the engine holds FP32 values that are not those"):
        held(nets)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("delta")
    return [models.save(Path(root) / str(seed), "qwen3_next", seed, steps=0) for seed in (0, 1)]


def trainer(path: str, tp: int = 1) -> tuple[Any, Source]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    return model, convert(model, jetrl_patch.status().config, shapes, rollout_tp=tp, device_type="cpu")


@torch.no_grad()
def off(model: Any, samples: list[Any]) -> float:
    """Mean difference between the engine's log-probs and the trainer's."""
    found = []
    for sample in samples:
        ids, start = torch.tensor([sample.prompt + sample.response]), len(sample.prompt)
        logits = model(input_ids=ids, use_cache=False).logits[0, start - 1 : -1].float()
        ours = logits.log_softmax(-1).gather(1, ids[0, start:, None])[:, 0]
        found.append((ours - torch.tensor(sample.log_probs)).abs())
    return float(torch.cat(found).mean())


@pytest.mark.e2e
@pytest.mark.parametrize("mode", ["linear", pytest.param("fp8-rollout", marks=pytest.mark.slow)])
def test_an_engine_serves_what_it_was_sent(folders: list[str], engine: Callable[..., Any], mode: str) -> None:
    jetrl_patch.enable(**MODES[mode])
    first, second = folders
    llm = engine(Job(model=first, config=jetrl_patch.status().config), 256)
    (old, _), (model, source) = trainer(first), trainer(second)
    inside = {name.rpartition(".")[2] for name in source.layers if name.startswith(NET)}
    assert inside == {"in_proj_qkvz", "out_proj"}
    assert set(llm.collective_rpc("jetrl_report")[0]["layers"]) == set(source.layers)

    worker, stats = worker_of(llm), SyncStats()
    items = list(source.stream(model.state_dict().items(), stats))
    assert push(worker, items)["layers"] == len(source.layers)
    quantized = {f"{layer}.{kind}" for layer in source.layers for kind in ("weight", "weight_scale_inv")}
    if mode == "linear":  # the other sends BF16, which is quantized in the engine
        assert in_engine(llm) == {name: stats.digests[name] for name in quantized}
    plain = {name: value for name, value in items if name in stats.digests and name not in quantized}
    announced = {name: (tuple(value.shape), "bfloat16") for name, value in plain.items()}
    assert {f"{NET}.{leaf}" for leaf in ("A_log", "dt_bias", "conv1d.weight", "in_proj_ba.weight", "norm.weight")} <= set(plain)
    held: dict[str, int] = {}
    for rect in worker.jetrl_receiver.installer.installed(announced):
        held[rect.name] = add(held.get(rect.name, 0), rect.digest)
    assert {name: held.get(name) for name in plain} == {name: stats.digests[name] for name in plain}

    prompts = [list(range(3, 3 + length)) for length in (5, 70, 130)]  # in a state's first chunk of 64 tokens, and beyond
    samples = generate(llm, prompts, 24, 1.0)
    same, other = off(model, samples), off(old, samples)
    most = MISMATCH[MODES[mode]["precision"]]
    assert same < most and 4 * same < other, (same, other)

    net = worker.model_runner.get_model().model.layers[0].linear_attn
    before = net.conv1d.weight.data.clone()
    net.conv1d.weight.data.copy_(before.flip(0))
    assert off(model, generate(llm, prompts, 24, 1.0)) > most  # a wrong convolution is seen
    net.conv1d.weight.data.copy_(before)


def test_what_exact_mode_refuses_by_name() -> None:
    from jetrl_patch.errors import ModelError
    from jetrl_patch.exact.modules import check_family

    for made, family in ((models, "qwen3_next"), (vision_models, "qwen3_5"), (vision_models, "qwen3_5_moe")):
        assert check_family(made.config_of(family)).delta_net
        for key, value in (("attention_bias", True), ("attn_output_gate", False), ("output_gate_type", "sigmoid")):
            with pytest.raises(ModelError, match=rf"does not cover this {family} model: {key}={value!r}"):
                check_family(made.config_of(family, **{key: value}))
    with pytest.raises(ModelError, match=r"norm_topk_prob=False \(expected True: the trainer always makes"):
        check_family(vision_models.config_of("qwen3_5_moe", norm_topk_prob=False))
