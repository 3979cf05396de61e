"""Smoothing on export: the same function, smaller quantization errors, nothing extra held or sent."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jetrl_patch.backends.rowwise import quantize_int8_rows
from jetrl_patch.config import Config
from jetrl_patch.errors import ModelError, SyncError
from jetrl_patch.fp8.scaling import factors, groups_of, smoothed
from jetrl_patch.sync.protocol import COMMIT, MANIFEST
from jetrl_patch.sync.send import SyncStats
from jetrl_patch.trainer.source import Source, convert
from tests.models import build

INT8 = Config(precision="int8-rollout")
IDS = torch.randint(2, 384, (4, 40), generator=torch.Generator().manual_seed(3))


def source_of(model: Any, config: Config = INT8) -> Source:
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    return convert(model, config, shapes, rollout_tp=1, device_type="cpu")


def exported(model: Any, source: Source) -> dict[str, torch.Tensor]:
    """The exported weights, in BF16 and before quantization."""
    assert source.smoother is not None
    source.begin_sync(model.named_parameters)
    return dict(source.smoother.apply(model.named_parameters()))


def with_outliers(family: str = "qwen3", channels: int = 4, size: float = 50.0, **options: Any) -> Any:
    """A model whose residual stream has a few outlier channels, as in large models."""
    model = build(family, **options)
    with torch.no_grad():
        for layer in model.model.layers:
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                norm.weight[:channels] *= size
    return model


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(input_ids=IDS, use_cache=False).logits


@pytest.mark.parametrize("observe", [False, True])
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen2", {}),
        ("qwen3", {"tie_word_embeddings": True}),
        ("llama", {"attention_bias": True}),
        ("mistral", {}),
        ("phi3", {}),
    ],
)
def test_it_is_the_identity_to_the_last_bit(family: str, options: dict[str, Any], observe: bool) -> None:
    """In FP64 and, because factors are powers of two, in BF16, for every family that may be smoothed."""
    model = other(family) if family in ("mistral", "phi3") else with_outliers(family, **options)
    held = {name: p.detach().clone() for name, p in model.named_parameters()}
    source = source_of(model)
    exported(model, source)  # the first export starts observation
    before = logits(model)
    if not observe:
        source = source_of(model)
    sent = exported(model, source)
    smooth = copy.deepcopy(model)
    changed = smooth.load_state_dict(sent, strict=False)
    assert not changed.unexpected_keys
    norm = "model.layers.0.input_layernorm.weight"
    assert not torch.equal(sent[norm], model.get_parameter(norm)), "nothing was smoothed"
    assert torch.equal(logits(smooth), before)
    assert all(torch.equal(p, held[name]) for name, p in model.named_parameters()), "the trainer's own weights changed"
    assert torch.equal(logits(smooth.double()), logits(model.double()))


def other(family: str) -> Any:
    from transformers import MistralConfig, MistralForCausalLM, Phi3Config, Phi3ForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": 384, "hidden_size": 192, "intermediate_size": 320, "num_hidden_layers": 2, "num_attention_heads": 3,
        "num_key_value_heads": 1, "max_position_embeddings": 128, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None,
    }  # fmt: skip
    torch.manual_seed(0)
    kinds: dict[str, Any] = {"mistral": (MistralForCausalLM, MistralConfig), "phi3": (Phi3ForCausalLM, Phi3Config)}
    kind, config = kinds[family]
    model = kind(config(**sizes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layernorm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.to(torch.bfloat16).eval()


@settings(max_examples=60)
@given(st.integers(1, 60), st.integers(1, 3), st.floats(0, 1), st.integers(0, 2**31), st.booleans())
def test_factors(k: int, readers: int, alpha: float, seed: int, seen: bool) -> None:
    g = torch.Generator().manual_seed(seed)
    norm = torch.randn(k, generator=g)
    weights = [torch.randn(n + 1, k, generator=g) for n in range(readers)]
    x = torch.randn(k, generator=g).abs() * 10 if seen else None
    dead = seed % k
    weights = [w.index_fill(1, torch.tensor([dead]), 0.0) for w in weights]
    found = factors(norm, weights, x, alpha)
    assert torch.equal(found, 2.0 ** found.log2().round()), "powers of two"
    assert found[dead] == 1
    reach = (norm.abs() if x is None else x).double()
    by_hand = reach**alpha / torch.cat(weights).abs().amax(0).double() ** (1 - alpha)
    alive = torch.ones(k, dtype=torch.bool)
    alive[dead] = False
    by_hand, found = by_hand[alive], found[alive].double()
    if len(found):
        by_hand /= by_hand.log().mean().exp()
        near = (by_hand > 2.0**-12) & (by_hand < 2.0**12)
        assert bool(((found / by_hand)[near] < 1.4143).all() and (by_hand / found < 1.4143)[near].all())


def test_factors_of_nothing_usable() -> None:
    assert factors(torch.zeros(4), [torch.ones(2, 4)], None, 0.5).tolist() == [1.0] * 4
    x = torch.tensor([1.0, float("nan"), float("inf"), 4.0])
    assert factors(torch.ones(4), [torch.ones(2, 4)], x, 1.0).tolist() == [0.5, 1.0, 1.0, 2.0]


def through_int8(x: torch.Tensor) -> torch.Tensor:
    q, s = quantize_int8_rows(x)
    return (q.float() * s).to(torch.bfloat16)


def int8_error(model: Any, smoothing: float, observe: bool = True) -> float:
    """Mean |Δ log-prob| between a model with the rollout's INT8 linears and the same model in BF16."""
    reference = logits(model).float().log_softmax(-1)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    if smoothing:
        source = source_of(model, Config(precision="int8-rollout", smoothing=smoothing))
        exported(model, source)
        if observe:
            logits(model)
        weights = exported(model, source)
    rollout = copy.deepcopy(model)
    rollout.load_state_dict(weights, strict=False)
    names = set(source_of(model).layers)
    for name, module in rollout.named_modules():
        if name in names:
            module.weight.data = through_int8(module.weight.data)
            module.register_forward_pre_hook(lambda _, x: (through_int8(x[0].flatten(0, -2)).view_as(x[0]),))
    return float((logits(rollout).float().log_softmax(-1) - reference).abs().mean())


def test_outliers_hurt_int8_and_smoothing_heals() -> None:
    """Channels that the norm's weight makes large, and channels whose size only the forward reveals."""
    model = with_outliers(size=30.0)
    plain, by_weights, by_forward = int8_error(model, 0), int8_error(model, 0.5, observe=False), int8_error(model, 0.5)
    assert by_forward < 0.7 * plain and by_weights < 0.8 * plain, (plain, by_weights, by_forward)
    hidden = build("qwen3")
    with torch.no_grad():
        hidden.model.embed_tokens.weight[:, :3] *= 40.0  # large in x̂ itself, which the norm's weight does not show
    plain, by_weights, by_forward = (
        int8_error(hidden, 0),
        int8_error(hidden, 0.5, observe=False),
        int8_error(hidden, 0.5),
    )
    assert by_forward < 0.9 * plain and by_forward < by_weights, (plain, by_weights, by_forward)


def test_the_stream_keeps_names_shapes_and_the_trainers_parameters() -> None:
    model = with_outliers()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    source = source_of(model)
    source.begin_sync(model.named_parameters)
    sent = dict(source.stream(model.named_parameters(), SyncStats()))
    quantized = {f"{layer}.weight" for layer in source.layers}
    assert set(sent) == {*before, MANIFEST, COMMIT, *(f"{name}_scale_inv" for name in quantized)}
    assert all(sent[name].dtype == torch.int8 for name in quantized)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    same = (
        "model.norm.weight",
        "lm_head.weight",
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.q_norm.weight",
    )
    assert all(torch.equal(sent[name], before[name]) for name in same)
    untouched = "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(sent[untouched], quantize_int8_rows(before[untouched]).q)


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.v_proj.weight", "model.layers.1.post_attention_layernorm.weight"]
)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_stops_the_sync_by_name(name: str, value: float) -> None:
    model = build("qwen3")
    source = source_of(model)
    with torch.no_grad():
        model.get_parameter(name).view(-1)[5] = value
    with pytest.raises(SyncError, match=f"{name} holds NaN or Inf"):
        list(source.stream(model.named_parameters(), SyncStats()))


def test_a_group_that_does_not_come_whole_is_named_by_the_sync() -> None:
    model = build("qwen3")
    source = source_of(model)
    lost = "model.layers.0.self_attn.k_proj.weight"
    with pytest.raises(SyncError, match=f"never sent them: {lost}"):
        list(source.stream((item for item in model.named_parameters() if item[0] != lost), SyncStats()))


def test_one_group_is_held_at_a_time() -> None:
    names = [
        f"model.layers.{i}.{leaf}.weight"
        for i in range(3)
        for leaf in ("mlp.gate_proj", "mlp.up_proj", "post_attention_layernorm")
    ]
    asked: list[str] = []

    def weights() -> Any:
        for name in names:
            asked.append(name)
            yield name, torch.ones(4) if "norm" in name else torch.ones(2, 4)

    stream = smoothed(weights(), groups_of(names, "llama", ""), 0.5, lambda _: None)
    for at, (name, _) in enumerate(stream):
        assert len(asked) - at <= 3, name


def test_another_family_is_refused_with_the_way_out() -> None:
    model = build("qwen3")
    model.config.model_type = "gemma2"
    with pytest.raises(
        ModelError, match=r"smoothing=0\.5: required one of the model .*qwen3.*, found model_type='gemma2'"
    ):
        source_of(model)
    assert source_of(model, Config(precision="int8-rollout", smoothing=0)).smoother is None


def test_a_reference_model_is_never_watched() -> None:
    model = build("qwen3")
    source = source_of(model)
    norm = model.model.layers[0].input_layernorm
    assert not norm._forward_hooks
    list(source.stream(model.named_parameters(), SyncStats()))
    list(source.stream(model.named_parameters(), SyncStats()))
    assert len(norm._forward_hooks) == 1


def test_what_the_observer_keeps() -> None:
    """The maximum over all forwards since the last call; the previous figures remain if there was none."""
    from jetrl_patch.fp8.scaling import Observer

    norm = torch.nn.Identity()
    observer = Observer({"n": norm}, {"n": 3})
    norm(torch.full((1, 3), 100.0))  # before observation starts
    observer.start()
    observer.agree()
    assert observer.seen("n") is None
    norm(torch.tensor([[[1.0, -5.0, 0.0]], [[2.0, 1.0, 0.0]]]))
    norm(torch.tensor([[3.0, 1.0, float("nan")]]).to(torch.bfloat16))
    norm(torch.zeros(0, 3))
    observer.agree()
    assert observer.seen("n").tolist() == [3.0, 5.0, 0.0]  # type: ignore[union-attr]
    observer.agree()
    assert observer.seen("n").tolist() == [3.0, 5.0, 0.0]  # type: ignore[union-attr]
    norm(torch.full((2, 3), 0.5))
    observer.agree()
    assert observer.seen("n").tolist() == [0.5, 0.5, 0.5]  # type: ignore[union-attr]
