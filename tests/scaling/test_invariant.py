"""QuRL's invariant scale keeps the function, and is applied once to the weights of every process."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import jetrl_patch
from jetrl_patch.backends.rowwise import quantize_int8_rows
from jetrl_patch.config import Config
from jetrl_patch.errors import ConfigError, ModelError
from jetrl_patch.fp8.scaling import RECORD, scale_once
from jetrl_patch.sync.send import SyncStats
from jetrl_patch.trainer.source import convert
from tests.models import VARIANTS, build

IDS = torch.randint(2, 384, (3, 33), generator=torch.Generator().manual_seed(5))


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(input_ids=IDS, use_cache=False).logits


@pytest.mark.parametrize("name", ["qwen2", "qwen3-tied", "llama-odd"])
@pytest.mark.parametrize("scale", [2.0, 0.5, 4.0])
def test_powers_of_two_change_no_bit(name: str, scale: float) -> None:
    family, options = VARIANTS[name]
    model = build(family, **options)
    before, plain = logits(model), copy.deepcopy(model)
    assert scale_once(model, scale) is True
    assert torch.equal(logits(model), before)
    for key, weight in plain.named_parameters():
        scaled = model.get_parameter(key)
        if key.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight")):
            assert torch.equal(scaled * scale, weight), key
        elif key.endswith(("input_layernorm.weight", "post_attention_layernorm.weight")):
            assert torch.equal(scaled, weight * scale), key
        else:
            assert torch.equal(scaled, weight), key


def test_other_factors_are_the_identity_within_rounding() -> None:
    model = build("qwen2").double()
    before = logits(model)
    scale_once(model, 1.5)
    assert torch.allclose(logits(model), before, rtol=1e-12, atol=1e-12)
    rounded = build("qwen2")
    before = logits(rounded).float().softmax(-1)
    scale_once(rounded, 1.5)
    assert not torch.equal(
        rounded.model.layers[0].mlp.up_proj.weight, build("qwen2").model.layers[0].mlp.up_proj.weight
    )
    assert (logits(rounded).float().softmax(-1) - before).abs().max() < 0.1


def test_an_update_weighs_more() -> None:
    """d loss / d (W / s) = s · d loss / d W."""
    plain, scaled = build("llama").double(), build("llama").double()
    scale_once(scaled, 1.5)
    for model in (plain, scaled):
        model(input_ids=IDS, labels=IDS).loss.backward()
    name = "model.layers.1.self_attn.k_proj.weight"
    assert torch.allclose(scaled.get_parameter(name).grad, 1.5 * plain.get_parameter(name).grad, rtol=1e-9, atol=1e-15)


def test_it_is_applied_once_also_through_a_checkpoint(tmp_path: Any) -> None:
    from transformers import AutoModelForCausalLM

    model = build("qwen3")
    scale_once(model, 1.5)
    once = model.model.layers[0].mlp.gate_proj.weight.clone()
    assert scale_once(model, 1.5) is False
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert getattr(again.config, RECORD) == 1.5
    assert scale_once(again, 1.5) is False
    assert torch.equal(again.model.layers[0].mlp.gate_proj.weight, once)
    with pytest.raises(ConfigError, match=r"invariant_scale=2: .*jetrl_invariant_scale=1\.5 in its config\.json"):
        scale_once(again, 2.0)


def test_an_unknown_family_is_refused_untouched() -> None:
    model = build("qwen3")
    model.config.model_type = "gemma"
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ModelError, match=r"invariant_scale=1\.5: required one of the model .*found model_type='gemma'"):
        scale_once(model, 1.5)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_partitions_of_zero3_and_meta_tensors() -> None:
    model = build("qwen3")
    weight = model.model.layers[0].self_attn.q_proj.weight
    part = weight.detach().flatten()[:1000].clone()
    weight.data = torch.empty(0)
    weight.ds_tensor = part.clone()
    scale_once(model, 2.0)
    assert torch.equal(weight.ds_tensor * 2, part)
    meta = build("qwen3").to("meta")
    assert scale_once(meta, 2.0) and meta.model.norm.weight.is_meta


@pytest.mark.parametrize("precision", ["fp8-unified", "fp8-rollout", "int8-rollout"])
def test_the_policy_is_scaled_and_the_reference_stays(precision: Any) -> None:
    jetrl_patch.enable(precision=precision, invariant_scale=2.0)
    config = jetrl_patch.status().config
    assert config is not None
    sent, results = {}, {}
    for reference in (False, True):
        model = build("qwen3")
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        source = convert(model, config, shapes, rollout_tp=1, device_type="cpu", reference=reference)
        assert getattr(model.config, RECORD, None) == (None if reference else 2.0)
        results[reference] = logits(model)
        sent[reference] = dict(source.stream(model.named_parameters(), SyncStats()))
    assert torch.equal(results[False], results[True])  # also in FP8: its scales change by the same power of two
    name = "model.layers.0.mlp.up_proj.weight"
    assert (
        torch.equal(sent[False][name].view(torch.uint8), sent[True][name].view(torch.uint8))
        or precision == "fp8-rollout"
    )
    norm = "model.layers.0.post_attention_layernorm.weight"
    if precision != "int8-rollout":  # smoothing normalizes the factors' mean to one
        assert torch.equal(sent[False][norm], 2 * sent[True][norm])


def test_an_update_that_int8_did_not_see_is_seen() -> None:
    """QuRL's purpose: the same update of W changes more codes of W / s."""
    torch.manual_seed(0)
    weight = torch.randn(256, 256)
    update = 2e-3 * torch.randn(256, 256).sign()
    moved = [
        (quantize_int8_rows(weight / s).q != quantize_int8_rows(weight / s + update).q).float().mean().item()
        for s in (1.0, 1.5)
    ]
    assert moved[1] > 1.4 * moved[0] > 0


def test_openrlhfs_reference_actor_is_known_by_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    from jetrl_patch import session
    from jetrl_patch.adapters.openrlhf import model, state

    config = Config(precision="int8-rollout", invariant_scale=1.5).resolved()
    monkeypatch.setattr(session, "is_active", lambda: True)
    monkeypatch.setattr(session, "active_config", lambda: config)
    setup = model.setup_distributed(lambda self, strategy: None)
    strategy = SimpleNamespace(args=SimpleNamespace(jetrl=config.to_env()))
    for name, reference in (("PolicyModelActor", False), ("ReferenceModelActor", True)):
        setup(type(name, (), {})(), strategy)
        assert state.WORKER.reference is reference
    state.reset()


@pytest.fixture
def active(monkeypatch: pytest.MonkeyPatch) -> None:
    from jetrl_patch import session

    config = Config(precision="int8-rollout").resolved()
    monkeypatch.setattr(session, "is_active", lambda: True)
    monkeypatch.setattr(session, "active_config", lambda: config)


BUILT_AND_SAVED = [(1.5, 1.5, None), (None, None, None), (None, 1.5, None), (1.5, None, "without"), (1.5, 2.0, "=2.0")]


def settled(built: float | None, load: Any, error: str | None, config: Any) -> None:
    if built is not None:
        setattr(config, RECORD, built)
    if error is None:
        load()
        return
    with pytest.raises(ConfigError, match=f"resuming from .*invariant_scale=1.5.*Resume .*{error}"):
        load()


@pytest.mark.parametrize(("built", "saved", "error"), BUILT_AND_SAVED)
def test_a_resumed_verl_run(tmp_path: Any, active: None, built: Any, saved: Any, error: Any) -> None:
    from jetrl_patch.adapters.verl.model import compare_scales

    config = build("qwen3").config
    if saved is not None:
        setattr(config, RECORD, saved)
    config.save_pretrained(tmp_path / "huggingface")
    fresh, loaded = build("qwen3").config, []
    engine = SimpleNamespace(_jetrl=object(), module=SimpleNamespace(config=fresh))
    load = compare_scales(lambda self, path: loaded.append(path))
    settled(built, lambda: load(engine, str(tmp_path)), error, fresh)
    if error is None:
        assert loaded == [str(tmp_path)] and getattr(fresh, RECORD, None) == saved
    load(SimpleNamespace(), str(tmp_path))  # a critic
    load(engine, str(tmp_path / "nothing"))  # an older checkpoint, or another tool's


@pytest.mark.parametrize(("built", "saved", "error"), BUILT_AND_SAVED)
def test_a_resumed_openrlhf_run(active: None, built: Any, saved: Any, error: Any) -> None:
    from jetrl_patch.adapters.openrlhf.checkpoint import load_ckpt, save_ckpt

    disk: dict[str, Any] = {}

    def write(
        self: Any, model: Any, save_dir: Any, tag: Any = None, max_num: int = 3, client_state: Any = None
    ) -> None:
        disk.update(client_state or {})

    old, fresh = build("qwen3").config, build("qwen3").config
    if saved is not None:
        setattr(old, RECORD, saved)
    states = {"consumed_samples": 8}
    rank = SimpleNamespace(is_rank_0=lambda: False)
    save_ckpt(write)(rank, SimpleNamespace(module=SimpleNamespace(config=old)), "here", "tag", 3, states)
    assert disk == {**states, **({RECORD: saved} if saved else {})} and states == {"consumed_samples": 8}
    engine = SimpleNamespace(module=SimpleNamespace(config=fresh))
    load = load_ckpt(
        lambda self, model, load_dir, tag=None, load_optimizer_states=True, load_module_only=False: ("here", dict(disk))
    )
    found: list[Any] = []
    settled(built, lambda: found.append(load(None, engine, "here")), error, fresh)
    if error is None:
        assert found == [("here", states)] and getattr(fresh, RECORD, None) == saved
