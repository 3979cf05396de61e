"""A prepared model in real transformers: a token's bits do not depend on its batch, nor gradients on checkpointing."""

from __future__ import annotations

import copy

import pytest
import torch

import jetrl_patch
from jetrl_patch.config import Config
from jetrl_patch.errors import ModelError, NotPatchedError
from jetrl_patch.exact.ops import token_log_probs
from jetrl_patch.fp8.convert import experts_of
from jetrl_patch.fp8.linear import Fp8Linear
from jetrl_patch.fp8.mixture import WHOLE, ExpertSplit
from jetrl_patch.models.families import covering
from jetrl_patch.models.family import DROPOUTS
from jetrl_patch.sync.protocol import Terms
from jetrl_patch.trainer.prepare import prepare_model
from jetrl_patch.trainer.source import convert

from .. import vision_models
from ..fp8.thresholds import sqnr
from ..models import VARIANTS, build

LENGTHS = [3, 17, 40, 29]


@pytest.fixture(params=["qwen2", "qwen3", "llama", "qwen2-odd", "qwen3-tied", "llama-odd", "llama3-rope"])
def model(request):
    jetrl_patch.enable(precision="fp8-unified")
    family, options = VARIANTS[request.param]
    m = build(family, **options)
    prepare_model(m, Config(precision="fp8-unified").resolved())
    return m


def sequences(model):
    g = torch.Generator().manual_seed(0)
    return [torch.randint(2, model.config.get_text_config().vocab_size, (n,), generator=g) for n in LENGTHS]


def padded(ids, side, extra=0):
    width = max(len(t) for t in ids) + extra
    batch, mask = torch.zeros(len(ids), width, dtype=torch.long), torch.zeros(len(ids), width, dtype=torch.long)
    for row, t in enumerate(ids):
        place = slice(width - len(t), width) if side == "left" else slice(0, len(t))
        if side == "both":
            place = slice(extra // 2, extra // 2 + len(t))
        batch[row, place], mask[row, place] = t, 1
    return batch, mask, (mask.cumsum(1) - 1).clamp(min=0)


@torch.no_grad()
def test_a_token_has_the_same_logits_in_every_company(model):
    ids = sequences(model)
    alone = [model(input_ids=t[None], use_cache=False).logits[0] for t in ids]
    for side, extra in (("left", 0), ("right", 0), ("left", 9), ("both", 12)):
        batch, mask, positions = padded(ids, side, extra)
        out = model(input_ids=batch, attention_mask=mask, position_ids=positions, use_cache=False).logits
        for row, expected in enumerate(alone):
            assert torch.equal(out[row][mask[row].bool()], expected), side
    packed = torch.cat(ids)[None]
    positions = torch.cat([torch.arange(len(t)) for t in ids])[None]
    out = model(input_ids=packed, position_ids=positions, use_cache=False).logits[0]
    assert torch.equal(out, torch.cat(alone))
    for t, expected in zip(ids, alone, strict=True):  # a prefix does not see what follows
        assert torch.equal(model(input_ids=t[None, : len(t) // 2 + 1], use_cache=False).logits[0], expected[: len(t) // 2 + 1])


def loss_of(model, ids, side):
    batch, mask, positions = padded(ids, side)
    out = model(input_ids=batch, attention_mask=mask, position_ids=positions, use_cache=False).logits
    weights = mask[:, 1:].float() * mask[:, :-1]
    return -(token_log_probs(out[:, :-1], batch[:, 1:]) * weights).sum() / weights.sum()


def assert_checkpointing_and_fp32_masters_change_nothing(model, name):
    """The loss, and the gradient of one parameter of the model."""
    ids = sequences(model)
    results = []
    for kind in ("bf16", "checkpointing", "fp32 masters"):
        m = copy.deepcopy(model).train()
        if kind == "checkpointing":
            m.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if kind == "fp32 masters":
            m.float()
        loss = loss_of(m, ids, "right")
        loss.backward()
        results.append((loss.item(), m.get_parameter(name).grad.float()))
    assert results[0][0] == results[1][0] == results[2][0]
    assert torch.equal(results[0][1], results[1][1])
    assert sqnr(results[0][1], results[2][1]) > 40  # BF16 gradients are the FP32 ones, rounded


def test_checkpointing_and_fp32_masters_change_nothing(model):
    assert_checkpointing_and_fp32_masters_change_nothing(model, "model.layers.0.mlp.down_proj.weight")


@torch.no_grad()
def test_another_attention_or_mask_is_an_error(model):
    ids = sequences(model)[1][None]
    expected = model(input_ids=ids, use_cache=False).logits
    with pytest.raises(ModelError, match=r"required a padding mask \[B, T\].*found a mask \[1, 1, 17, 17\]"):
        model(input_ids=ids, attention_mask=torch.ones(1, 1, 17, 17, dtype=torch.bool).tril(), use_cache=False)
    model.set_attn_implementation("sdpa")
    with pytest.raises(ModelError, match="attn_implementation of a converted model: required jetrl_exact, found sdpa"):
        model(input_ids=ids, use_cache=False)
    model.set_attn_implementation("jetrl_exact")
    assert torch.equal(model(input_ids=ids, use_cache=False).logits, expected)


@torch.no_grad()
def test_embeddings_from_outside_are_those_of_the_rollout(model):
    ids, embedding = sequences(model)[1][None], model.get_input_embeddings()
    expected = model(input_ids=ids, use_cache=False).logits
    assert torch.equal(model(inputs_embeds=embedding(ids).float(), use_cache=False).logits, expected)


def test_linear_mode_changes_the_linears_alone():
    model = build("qwen3")
    names = prepare_model(model, Config(precision="fp8-unified", align="linear").resolved())
    assert len(names) == 3 * 7 and all(isinstance(model.get_submodule(n), Fp8Linear) for n in names)
    assert type(model.model.norm).__name__ == "Qwen3RMSNorm" and model.config._attn_implementation != "jetrl_exact"
    assert prepare_model(build("qwen3"), Config(precision="fp8-rollout").resolved()) == names
    assert prepare_model(build("qwen3"), Config(precision="bf16").resolved()) == []


@pytest.mark.parametrize(("variant", "ep"), [("qwen3", 1), ("qwen3_moe-tp", 1), ("qwen3_moe", 2)])
@pytest.mark.parametrize("align", ["linear", "exact"])
def test_sums_are_split_as_the_rollouts_in_exact_mode_alone(variant, ep, align):
    """Outside of it vLLM adds the ranks' sums in BF16, in an order of its own, and no split could follow it."""
    jetrl_patch.enable(precision="fp8-unified", align=align)
    family, options = VARIANTS[variant]
    model, config = build(family, **options), jetrl_patch.status().config
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    source = convert(model, config, shapes, rollout_tp=2, rollout_ep=ep, device_type="cpu")
    linears = {name: m.fp8.splits for name, m in model.named_modules() if isinstance(m, Fp8Linear)}
    split = ("o_proj", "down_proj") if align == "exact" else ()
    assert linears and all((splits == 2) == name.endswith(split) if split else splits == 1 for name, splits in linears.items())
    mixtures = {str(own.split) for m in model.modules() if (own := experts_of(m)) is not None}
    rollouts = ExpertSplit.of(2, ep) if variant != "qwen3" else WHOLE
    assert mixtures == ({str(rollouts if align == "exact" else WHOLE)} if variant != "qwen3" else set())
    assert source.terms.experts == (str(rollouts) if align == "exact" else "")
    assert source.terms == Terms.of(config, source.terms.backend, rollouts)  # those of a worker


def test_errors_come_before_any_change():
    model = build("qwen3")
    with pytest.raises(NotPatchedError, match="enable"):
        prepare_model(model, Config(precision="fp8-unified").resolved())
    jetrl_patch.enable(precision="fp8-unified")
    config = Config(precision="fp8-unified").resolved()
    model.config.model_type = "gemma2"
    with pytest.raises(ModelError, match=r"qwen2, qwen3, llama.*gemma2.*linear"):
        prepare_model(model, config)
    model.config.model_type = "qwen3"
    model.config.hidden_act = "gelu"
    with pytest.raises(ModelError, match="hidden_act='gelu'"):
        prepare_model(model, config)
    model.config.hidden_act = "silu"
    with pytest.raises(ModelError, match="cuts a block of 128"):
        prepare_model(model, config, rollout_tp=3)
    assert not any(isinstance(m, Fp8Linear) for m in model.modules())


def test_enable_and_disable_leave_transformers_as_it_was():
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    before = dict(AttentionInterface._global_mapping), dict(AttentionMaskInterface._global_mapping)
    jetrl_patch.enable(precision="fp8-unified")
    assert "jetrl_exact" in AttentionInterface._global_mapping
    jetrl_patch.disable()
    after = dict(AttentionInterface._global_mapping), dict(AttentionMaskInterface._global_mapping)
    assert before == after


def test_no_attribute_of_dropout_is_overlooked():
    """Every probability that a module of an exact family reads is one of those that exact mode sets to 0."""
    for family in covering("exact"):
        model = vision_models.build(family) if family in vision_models.FAMILIES else build(family)
        found = {name for module in model.modules() for name in vars(module) if "dropout" in name}
        assert found <= set(DROPOUTS), family


def test_exact_mode_trains_without_dropout_and_says_so(caplog):
    jetrl_patch.enable(precision="fp8-unified")
    model = build("seed_oss", attention_dropout=0.1, residual_dropout=0.2).train()
    prepare_model(model, Config(precision="fp8-unified").resolved())
    ids = torch.arange(2, 40)[None]
    first, second = (model(input_ids=ids, use_cache=False).logits for _ in range(2))
    assert torch.equal(first, second) and torch.equal(first, model.eval()(input_ids=ids, use_cache=False).logits)
    assert "attention_dropout=0.1 and residual_dropout=0.2" in caplog.text and caplog.text.count("without dropout") == 1
    assert model.config.attention_dropout == 0.1
