"""Weights of a live engine after a BF16 checkpoint, an FP8 push and a broken push. One rank; test_parallel has two."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import jetrl_patch
from jetrl_patch import SyncError
from jetrl_patch.backends.quantize import quantize_weight
from jetrl_patch.measure.parity import Job
from jetrl_patch.models.layers import is_quantized
from jetrl_patch.sync.digest import add, digest
from jetrl_patch.sync.protocol import Terms
from jetrl_patch.sync.send import SyncStats, quantized_stream
from tests.models import config_of, save


def weights_of(path: str) -> dict[str, torch.Tensor]:
    """Every weight as a framework's state has it: a tied one under both of its names, the second of them far from the first."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    return {name: p.detach() for name, p in model.named_parameters(remove_duplicate=False)}


def stream(path: str, config: Any, terms: Terms, change: Callable[..., Any] = lambda items: items) -> list[Any]:
    weights = weights_of(path)
    names = [n.removesuffix(".weight") for n, w in weights.items() if w.dim() == 2]
    layers = [name for name in names if is_quantized(name, config.exclude)]
    shapes = {name: tuple(w.shape) for name, w in weights.items()}
    items = quantized_stream(weights.items(), terms=terms, layers=layers, shapes=shapes, stats=SyncStats())
    return list(change(items))


def push(worker: Any, items: list[Any]) -> dict[str, int]:
    for start in range(0, len(items), 5):
        worker.jetrl_receiver.on_bucket(items[start : start + 5])
    return worker.jetrl_receiver.finish()


def expected(path: str, exclude: tuple[str, ...], scale_format: str) -> dict[str, int]:
    found = {}
    for name, weight in weights_of(path).items():
        if weight.dim() == 2 and is_quantized(name.removesuffix(".weight"), exclude):
            q, s = quantize_weight(weight, scale_format)
            found[name], found[name + "_scale_inv"] = digest(q), digest(s)
    return found


def in_engine(llm: Any) -> dict[str, int]:
    (report,) = llm.collective_rpc("jetrl_report")
    found: dict[str, int] = {}
    for name, *_, value in report["digests"]:
        found[name] = (found.get(name, 0) + value) % 2**64
    return found


def worker_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("variant", "exclude", "scale_format"),
    [
        ("qwen2-odd", (), "pow2"),
        ("llama-odd", ("layers.1.mlp", "self_attn.o_proj"), "fp32"),
        ("smollm3", (), "pow2"),
        ("llama-odd", (), "mxfp8"),
        ("qwen2-odd", (), "nvfp4"),
    ],
)
def test_bytes_in_the_engine_are_the_trainers(
    checkpoint: Callable[..., str],
    engine: Callable[..., Any],
    variant: str,
    exclude: tuple[str, ...],
    scale_format: str,
) -> None:
    first, second = checkpoint(variant), checkpoint(variant, seed=1)
    jetrl_patch.enable(precision="fp8-unified", exclude=exclude, scale_format=scale_format)
    config = jetrl_patch.status().config
    llm = engine(Job(model=first, config=config))
    assert in_engine(llm) == expected(first, exclude, scale_format)
    names = [n.removesuffix(".weight") for n in expected(first, exclude, scale_format) if n.endswith(".weight")]
    assert set(jetrl_patch.status().layers) == set(names)
    assert f"{len(names)} " in str(jetrl_patch.status()) or names[0] in str(jetrl_patch.status())

    worker = worker_of(llm)
    receipt = push(worker, stream(second, config, worker.jetrl_receiver.terms))
    assert receipt["layers"] == len(names)
    assert in_engine(llm) == expected(second, exclude, scale_format) != expected(first, exclude, scale_format)
    plain = {name: weight for name, weight in weights_of(second).items() if name not in in_engine(llm)}
    held: dict[str, int] = {}
    for rect in worker.jetrl_receiver.installer.installed({name: (tuple(w.shape), "bfloat16") for name, w in plain.items()}):
        held[rect.name] = add(held.get(rect.name, 0), rect.digest)
    assert {name: held[name] for name in plain} == {name: digest(weight) for name, weight in plain.items()}


@pytest.mark.e2e
def test_a_weight_that_is_fused_on_disk(tmp_path: Any, engine: Callable[..., Any]) -> None:
    """Phi-3 has qkv_proj and gate_up_proj as one weight each: one block grid over all of it, on both sides."""
    from transformers import Phi3Config, Phi3ForCausalLM

    torch.manual_seed(0)
    config = Phi3Config(
        hidden_size=192, intermediate_size=320, num_hidden_layers=1, num_attention_heads=3, num_key_value_heads=1,
        vocab_size=384, max_position_embeddings=512, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    Phi3ForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    jetrl_patch.enable(precision="fp8-unified", align="linear")
    settings = jetrl_patch.status().config
    llm = engine(Job(model=str(tmp_path), config=settings))
    assert set(in_engine(llm)) == set(expected(str(tmp_path), (), "pow2"))
    worker = worker_of(llm)
    push(worker, stream(str(tmp_path), settings, worker.jetrl_receiver.terms))


@pytest.mark.e2e
def test_a_broken_push_stops_the_engine_until_a_whole_one(
    checkpoint: Callable[..., str], engine: Callable[..., Any]
) -> None:
    from jetrl_patch.adapters.vllm.sample import generate

    path = checkpoint("qwen3")
    jetrl_patch.enable(precision="fp8-unified")
    config = jetrl_patch.status().config
    llm = engine(Job(model=path, config=config))
    worker = worker_of(llm)
    terms = worker.jetrl_receiver.terms
    before = generate(llm, [[5, 6, 7]], 4, 1.0)
    assert all(torch.tensor(before[0].log_probs).isfinite())

    lost = "model.layers.1.mlp.down_proj.weight_scale_inv"
    with pytest.raises(SyncError, match=lost):
        push(worker, stream(path, config, terms, lambda items: (i for i in items if i[0] != lost)))
    assert llm.collective_rpc("jetrl_report", kwargs={"digests": False})[0]["state"] == "failed"
    assert bool(worker.model_runner.get_model().model.norm.weight.isnan().all())
    with pytest.raises(SyncError, match="does not generate"):
        worker.execute_model(None)

    push(worker, stream(path, config, terms))
    assert in_engine(llm) == expected(path, (), "pow2")
    generate(llm, [[5, 6, 7]], 4, 1.0)


@pytest.mark.e2e
def test_captured_graphs_find_the_weights_where_they_were(checkpoint: Callable[..., str], engine: Callable[..., Any]) -> None:
    """A sync writes in place, also after one that was broken off. A tensor that moved would leave graphs with freed memory."""
    path, other = checkpoint("qwen3"), checkpoint("qwen3", seed=1)
    jetrl_patch.enable(precision="fp8-unified")
    config = jetrl_patch.status().config
    worker = worker_of(engine(Job(model=path, config=config)))
    terms, installer = worker.jetrl_receiver.terms, worker.jetrl_receiver.installer
    assert not installer._captured  # this engine runs eagerly
    installer.stay_in_place()
    push(worker, stream(other, config, terms))
    with pytest.raises(SyncError, match="commit"):
        push(worker, stream(path, config, terms)[:-1])
    push(worker, stream(path, config, terms))
    norm = worker.model_runner.get_model().model.layers[1].input_layernorm.weight
    norm.data = norm.data.clone()
    with pytest.raises(SyncError, match=r"found 1 elsewhere \(model\.layers\.1\.input_layernorm\.weight\)"):
        push(worker, stream(path, config, terms))


@pytest.mark.e2e
def test_a_loader_that_changes_one_bit_of_any_tensor_is_found(
    checkpoint: Callable[..., str], engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint("qwen2")
    jetrl_patch.enable(precision="fp8-unified", exclude=("layers.1.mlp",))
    config = jetrl_patch.status().config
    worker = worker_of(engine(Job(model=path, config=config)))
    items = stream(path, config, worker.jetrl_receiver.terms)
    installer = worker.jetrl_receiver.installer
    load, changed = installer.load, ""

    def broken(weights: list[Any]) -> None:
        weights = [(name, tensor.clone()) for name, tensor in weights]
        for name, tensor in weights:
            if name == changed:
                tensor.view(-1)[-1:].view(torch.uint8)[0] ^= 1
        load(weights)

    monkeypatch.setattr(installer, "load", broken)
    for changed in (
        "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight", "model.layers.2.input_layernorm.weight",
        "model.layers.0.self_attn.k_proj.bias", "model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.down_proj.weight",
        "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight_scale_inv",
    ):  # fmt: skip
        with pytest.raises(SyncError, match=f"{changed}: the bytes in the rollout engine are not those"):
            push(worker, items)
    changed = ""
    push(worker, items)


@pytest.mark.e2e
@pytest.mark.parametrize("precision", ["bf16", "fp8-rollout"])
def test_a_bf16_push_is_served_at_once(
    checkpoint: Callable[..., str], engine: Callable[..., Any], precision: str
) -> None:
    """Also ``lm_head`` and, in BF16, the linears that vLLM on CPU repacks and empties."""
    from jetrl_patch.adapters.vllm.sample import generate

    first, second = checkpoint("qwen3"), checkpoint("qwen3", seed=1)
    jetrl_patch.enable(precision=precision)
    config = jetrl_patch.status().config
    prompts = [[5, 6, 7, 8], [9, 10]]
    fresh = generate(engine(Job(model=second, config=config)), prompts, 6, 0.0)
    llm = engine(Job(model=first, config=config))
    assert generate(llm, prompts, 6, 0.0) != fresh
    worker = worker_of(llm)
    if precision == "bf16":
        worker.model_runner.get_model().load_weights(weights_of(second).items())
    else:
        push(worker, stream(second, config, worker.jetrl_receiver.terms))
        assert in_engine(llm) == expected(second, (), "pow2")
    llm.reset_prefix_cache()
    assert generate(llm, prompts, 6, 0.0) == fresh


@pytest.mark.e2e
def test_nan_in_a_bf16_checkpoint_names_the_weight(checkpoint: Callable[..., str], engine: Callable[..., Any]) -> None:
    path = checkpoint("qwen3")
    jetrl_patch.enable(precision="fp8-rollout")
    config = jetrl_patch.status().config
    llm = engine(Job(model=path, config=config))
    name = "model.layers.2.self_attn.k_proj.weight"
    weight = weights_of(path)[name].clone()
    weight[3, 4] = float("nan")
    with pytest.raises(SyncError, match=r"layers\.2\.self_attn\.k_proj"):
        worker_of(llm).jetrl_receiver.installer.load([(name, weight)])


@pytest.mark.e2e
def test_dummy_weights_load(checkpoint: Callable[..., str], engine: Callable[..., Any]) -> None:
    """verl starts its engines that way and fills them with the first sync."""
    path = checkpoint("qwen3")
    jetrl_patch.enable(precision="fp8-unified")
    config = jetrl_patch.status().config
    llm = engine(Job(model=path, config=config, engine=(("load_format", "dummy"),)))
    worker = worker_of(llm)
    push(worker, stream(path, config, worker.jetrl_receiver.terms))
    assert in_engine(llm) == expected(path, (), "pow2")


def test_no_digests_of_an_engine_that_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading memory that is unmapped would end the process. vLLM 0.24 records a sleep of level 2 only in the worker."""
    from vllm.device_allocator.cumem import CuMemAllocator

    from jetrl_patch.adapters.vllm.worker import require_awake

    def sleeps(backup: Any = None, buffers: Any = ()) -> None:
        kv_cache, weights = (SimpleNamespace(tag=tag, cpu_backup_tensor=None) for tag in ("kv_cache", "weights"))
        weights.cpu_backup_tensor = backup
        monkeypatch.setattr(CuMemAllocator, "instance", SimpleNamespace(pointer_to_data={1: kv_cache, 2: weights}))
        require_awake(SimpleNamespace(_sleep_saved_buffers=dict(buffers)))

    sleeps()
    for found in ({"backup": torch.zeros(1)}, {"buffers": {"rotary": torch.zeros(1)}}):
        with pytest.raises(SyncError, match=r"found an engine that sleeps. .*wake_up\(tags=\[\"weights\"\]\)"):
            sleeps(**found)


# ---- Weights that are merged on disk, of families without a record -------------------------------

def test_models_in_which_gate_and_up_are_one_layer() -> None:
    """vLLM declares two for GLM, of which transformers' model has one."""
    from jetrl_patch.adapters.vllm.shards import merged_already

    packed = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
    for family, expected in {"glm": ["gate_up_proj"], "glm4": ["gate_up_proj"], "gemma2": [], "qwen3": []}.items():
        assert list(merged_already(packed, config_of(family))) == expected


@pytest.mark.e2e
@pytest.mark.parametrize(("family", "precision"), [("glm4", "fp8-unified"), ("glm4", "fp8-rollout"), ("glm", "fp8-unified")])
def test_a_layer_that_is_merged_on_disk(tmp_path: Path, engine: Callable[..., Any], family: str, precision: str) -> None:
    """The bytes of a sync are those that the engine makes of the checkpoint, and every layer has the trainer's name."""
    from transformers import AutoModelForCausalLM

    from jetrl_patch.trainer.source import convert

    path = save(tmp_path, family, steps=0)
    jetrl_patch.enable(precision=precision, align="linear" if precision == "fp8-unified" else None)
    config = jetrl_patch.status().config
    llm = engine(Job(model=path, config=config))
    loaded = in_engine(llm)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    shapes = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    source = convert(model, config, shapes, rollout_tp=1, device_type="cpu")
    assert push(worker_of(llm), list(source.stream(weights.items(), SyncStats())))["layers"] == 6 * 3
    assert in_engine(llm) == loaded and "model.layers.0.mlp.gate_up_proj.weight" in loaded
