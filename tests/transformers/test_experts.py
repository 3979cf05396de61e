"""A prepared mixture in real transformers: company of a token, gradients, the auxiliary loss, names of experts, errors."""

from __future__ import annotations

import itertools

import pytest
import torch
from transformers import AutoModelForCausalLM

import jetrl_patch
from jetrl_patch.config import Config
from jetrl_patch.errors import ModelError, NotPatchedError
from jetrl_patch.fp8.convert import expert_matrices, experts_of, per_expert, select_layers
from jetrl_patch.trainer.prepare import EXPERTS, prepare_model

from ..fp8.thresholds import GRADIENT_COSINE, sqnr
from ..models import VARIANTS, build, config_of
from .test_prepare import assert_checkpointing_and_fp32_masters_change_nothing, padded, sequences

EXACT = Config(precision="fp8-unified").resolved()


def prepared(name="qwen3_moe", config=EXACT):
    family, options = VARIANTS[name]
    model = build(family, **options)
    names = prepare_model(model, config)
    return model, names


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_moe-odd"])
@torch.no_grad()
def test_a_token_has_the_same_logits_in_every_company(name):
    jetrl_patch.enable(precision="fp8-unified")
    model, _ = prepared(name)
    ids = sequences(model)
    alone = [model(input_ids=t[None], use_cache=False).logits[0] for t in ids]
    for side, extra in (("left", 0), ("right", 9), ("both", 12)):
        batch, mask, positions = padded(ids, side, extra)
        out = model(input_ids=batch, attention_mask=mask, position_ids=positions, use_cache=False).logits
        for row, expected in enumerate(alone):
            assert torch.equal(out[row][mask[row].bool()], expected), side
    packed = torch.cat(ids)[None]
    positions = torch.cat([torch.arange(len(t)) for t in ids])[None]
    assert torch.equal(model(input_ids=packed, position_ids=positions, use_cache=False).logits[0], torch.cat(alone))


def test_the_layers_are_named_as_in_a_checkpoint(tmp_path):
    from safetensors.torch import load_file

    jetrl_patch.enable(precision="fp8-unified")
    model, names = prepared("qwen3_moe-odd")
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert {f"{name}.weight" for name in names} <= set(stored)
    sent = dict(itertools.chain.from_iterable(per_expert(name, tensor) for name, tensor in model.state_dict().items()))
    assert {name for name in sent if "lm_head" not in name} <= set(stored)
    experts = [name for name in sent if ".experts." in name]
    assert len(experts) == 3 * 5 * 3 and all(torch.equal(sent[name], stored[name]) for name in experts)
    assert list(expert_matrices(model)) == [name for name in names if ".experts." in name]
    assert select_layers(build("qwen3_moe"))[4] == "model.layers.0.mlp.experts.0.gate_proj"


def test_the_bytes_that_are_sent_are_those_that_compute():
    jetrl_patch.enable(precision="fp8-unified")
    model, _ = prepared("qwen3_moe-odd")
    model(input_ids=sequences(model)[1][None], use_cache=False)
    sent = dict(itertools.chain.from_iterable(per_expert(name, tensor) for name, tensor in model.state_dict().items()))
    for name, matrix in expert_matrices(model).items():
        before = matrix.fp8._cached
        after = matrix.fp8.quantized(sent[f"{name}.weight"])
        assert before is None or before[1] is after, name  # found by content: not quantized again


def test_gradients_and_auxiliary_loss_follow_bf16():
    jetrl_patch.enable(precision="fp8-unified")
    model, _ = prepared()
    plain = build("qwen3_moe")
    batch, mask, positions = padded(sequences(model), "right")
    found = {}
    for name, m in (("ours", model), ("plain", plain)):
        m.train()
        inputs = {"input_ids": batch, "attention_mask": mask, "position_ids": positions, "use_cache": False}
        out = m(**inputs, output_router_logits=True, labels=batch.masked_fill(mask == 0, -100))
        assert [tuple(t.shape) for t in out.router_logits] == [(batch.numel(), 8)] * 3
        out.loss.backward()
        found[name] = out.loss.item(), out.aux_loss.item(), {n: p.grad.float() for n, p in m.named_parameters()}
    for ours, theirs in zip(found["ours"][:2], found["plain"][:2], strict=True):
        assert abs(ours - theirs) < 0.05 * theirs
    largest = max(g.norm() for g in found["plain"][2].values())
    for name, grad in found["plain"][2].items():
        if grad.norm() > 1e-2 * largest and ".gate." not in name:  # a router's gradient jumps where a route flips
            cosine = torch.nn.functional.cosine_similarity(grad.flatten(), found["ours"][2][name].flatten(), dim=0)
            assert cosine > GRADIENT_COSINE, (name, cosine)


def test_the_auxiliary_loss_alone_moves_the_routers():
    jetrl_patch.enable(precision="fp8-unified")
    model, _ = prepared()
    plain = build("qwen3_moe")
    ids = sequences(model)[2][None]
    grads = []
    for m in (model, plain):
        m.train()
        m(input_ids=ids, output_router_logits=True, labels=ids, use_cache=False).aux_loss.backward()
        grads.append(m.model.layers[0].mlp.gate.weight.grad.float())
    assert sqnr(grads[0], grads[1]) > 10


def test_checkpointing_and_fp32_masters_change_nothing():
    jetrl_patch.enable(precision="fp8-unified")
    model, _ = prepared("qwen3_moe-odd")
    assert_checkpointing_and_fp32_masters_change_nothing(model, "model.layers.0.mlp.experts.gate_up_proj")


def test_linear_mode_keeps_transformers_router():
    jetrl_patch.enable(precision="fp8-unified", align="linear")
    model, names = prepared(config=jetrl_patch.status().config)
    assert len(names) == 3 * (4 + 8 * 3)
    assert type(model.model.layers[0].mlp.gate).__name__ == "Qwen3MoeTopKRouter"
    assert model.config._experts_implementation == EXPERTS
    ids = sequences(model)[1][None]
    plain = build("qwen3_moe")(input_ids=ids, use_cache=False).logits
    assert 5 < sqnr(model(input_ids=ids, use_cache=False).logits.detach(), plain.detach()) < 40
    model.set_experts_implementation("eager")
    with pytest.raises(ModelError, match="experts_implementation of a converted model: required jetrl_fp8, found eager"):
        model(input_ids=ids, use_cache=False)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"rollout_tp": 2}, r"experts of Qwen3MoeForCausalLM: .* each of 2 tensor parallel ranks .* found 128"),
        ({"rollout_tp": 3, "rollout_ep": 3}, r"experts of Qwen3MoeForCausalLM: .* 3 expert parallel ranks .* found 8 experts"),
        ({"device_type": "npu"}, r"required a CPU or a CUDA device .*found npu"),
        ({"exclude": ("experts.3",)}, r"required all 24 matrices of .*0\.mlp\.experts .*experts\.3\.gate_proj and 2 more"),
        ({"exclude": ("layers.1.mlp.experts.*.up_proj",)}, r"matrices of model\.layers\.1\.mlp\.experts .*0\.up_proj and 7 more"),
    ],
)
def test_what_is_refused_before_any_change(options, says):
    jetrl_patch.enable(precision="fp8-unified")
    model = build("qwen3_moe")
    config = Config(precision="fp8-unified", exclude=options.get("exclude", ())).resolved()
    with pytest.raises(ModelError, match=says):
        prepare_model(model, config, **{key: value for key, value in options.items() if key != "exclude"})
    assert model.config._experts_implementation != EXPERTS and not expert_matrices(model)


def test_an_implementation_that_is_not_registered_or_not_prepared():
    model = build("qwen3_moe")
    with pytest.raises(NotPatchedError, match=r"jetrl_fp8.*not registered.*enable"):
        prepare_model(model, Config(precision="fp8-unified", align="linear").resolved())
    jetrl_patch.enable(precision="fp8-unified")
    model.config._experts_implementation = EXPERTS
    with pytest.raises(ModelError, match=r"required a prepared model, found an unprepared Qwen3MoeExperts"):
        model(input_ids=torch.ones(1, 3, dtype=torch.long), use_cache=False)


@pytest.mark.parametrize("pattern", ["layers.1.mlp.experts", "layers.1.mlp", "model.layers.1"])
@torch.no_grad()
def test_a_pattern_that_matches_all_experts_of_a_block_leaves_them_in_bf16(pattern):
    jetrl_patch.enable(precision="fp8-unified")
    model, names = prepared("qwen3_moe-odd", Config(precision="fp8-unified", exclude=(pattern,)).resolved())
    assert not any(".1.mlp.experts." in name for name in names) and len(expert_matrices(model)) == 2 * 5 * 3
    experts = model.model.layers[1].mlp.experts
    assert experts_of(experts).plain.exact and experts_of(model.model.layers[0].mlp.experts).plain is None
    fp8, _ = prepared("qwen3_moe-odd")
    x, ids = torch.randn(40, 320, generator=torch.Generator().manual_seed(0)).bfloat16(), torch.arange(80).view(40, 2) % 5
    weights = torch.full((40, 2), 0.5)
    whole, before = experts(x, ids, weights), fp8.model.layers[1].mlp.experts(x, ids, weights)
    assert torch.equal(experts(x[3:4], ids[3:4], weights[3:4]), whole[3:4])
    assert 20 < sqnr(before, whole) < 30


def test_enable_and_disable_leave_the_registry_as_it_was():
    from transformers.integrations.moe import ExpertsInterface

    before = dict(ExpertsInterface._global_mapping)
    jetrl_patch.enable(precision="fp8-unified")
    assert EXPERTS in ExpertsInterface._global_mapping
    jetrl_patch.disable()
    assert dict(ExpertsInterface._global_mapping) == before
    jetrl_patch.enable(precision="fp8-rollout")
    assert dict(ExpertsInterface._global_mapping) == before


@pytest.mark.slow
def test_training_from_scratch_follows_bf16():
    jetrl_patch.enable(precision="fp8-unified")
    losses = []
    for fp8 in (True, False):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            config_of("qwen3_moe", output_router_logits=True, num_hidden_layers=2), dtype=torch.float32
        )
        if fp8:
            prepare_model(model, EXACT)
        optimizer, generator = torch.optim.AdamW(model.parameters(), lr=1e-3), torch.Generator().manual_seed(1)
        found = []
        for _ in range(80):
            moves = torch.randint(1, 4, (8, 48), generator=generator).cumsum(1)
            ids = (moves + torch.randint(2, 384, (8, 1), generator=generator)) % 382 + 2
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not fp8):
                loss = model.train()(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        losses.append(sum(found[-10:]) / 10)
    assert found[0] > 5 and losses[1] < 2
    assert abs(losses[0] - losses[1]) < 0.02 * losses[1]
