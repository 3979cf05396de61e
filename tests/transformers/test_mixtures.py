"""Each family with experts: a token's bits in any company, correction biases, the load balance."""

from __future__ import annotations

import pytest
import torch
import transformers
from packaging.version import Version

import jetrl_patch
from jetrl_patch.errors import ModelError
from jetrl_patch.models.families import FAMILIES
from jetrl_patch.trainer.prepare import prepare_model

from ..fp8.thresholds import SQNR_MIXTURE, sqnr
from ..models import corrections
from .stock import made, routes_of
from .test_prepare import padded, sequences

pytestmark = pytest.mark.pins
needs_tower = pytest.mark.skipif(
    Version(transformers.__version__) >= Version("5.19"), reason="not tried with the tower of transformers 5.19"
)

#: one that is even and one that is odd for each kind of router and of shared expert
NEW = ["olmoe-odd", "qwen2_moe", "qwen2_moe-odd", "mixtral-odd", "glm4_moe", "glm4_moe-odd", "deepseek_v3", "deepseek_v3-plain"]
NEW += ["qwen3_next", "qwen3_next-odd", pytest.param("qwen3_5_moe", marks=needs_tower)]


def prepared(name):
    jetrl_patch.enable(precision="fp8-unified")
    model = made(name)
    prepare_model(model, jetrl_patch.status().config)
    return model


@pytest.mark.parametrize("name", NEW)
@torch.no_grad()
def test_a_token_has_the_same_logits_in_every_company(name):
    model = prepared(name)
    ids = sequences(model)
    batch, mask, positions = padded(ids, "both", 12)
    out = model(input_ids=batch, attention_mask=mask, position_ids=positions, use_cache=False).logits
    alone = [model(input_ids=t[None], use_cache=False).logits[0] for t in ids]
    for row, expected in enumerate(alone):
        assert torch.equal(out[row][mask[row].bool()], expected)
    positions = torch.cat([torch.arange(len(t)) for t in ids])[None]
    packed = model(input_ids=torch.cat(ids)[None], position_ids=positions, use_cache=False).logits[0]
    assert torch.equal(packed, torch.cat(alone))


@needs_tower
@torch.no_grad()
def test_a_delta_net_leaves_a_cache_empty_and_refuses_one_with_states():
    model = prepared("qwen3_5_moe")
    ids = sequences(model)[1][None]
    found = model(input_ids=ids, use_cache=True)  # OpenRLHF's forward pass without gradients
    assert torch.equal(found.logits, model(input_ids=ids, use_cache=False).logits)
    with pytest.raises(ModelError, match="got 1 queries and 18 keys of a cache"):
        model(input_ids=ids[:, :1], past_key_values=found.past_key_values)
    jetrl_patch.disable()
    states = made("qwen3_5_moe")(input_ids=ids, use_cache=True).past_key_values
    with pytest.raises(ModelError, match=r"got a cache of states\. Pass use_cache=False"):
        model(input_ids=ids[:, :1], past_key_values=states)


@pytest.mark.parametrize("name", ["olmoe-odd", "qwen2_moe", "mixtral-odd"])
def test_the_auxiliary_loss_alone_moves_the_routers(name):
    model = prepared(name)
    ids, grads, losses = sequences(model)[2][None], [], []
    for m in (model, made(name)):
        m.train()
        loss = m(input_ids=ids, output_router_logits=True, labels=ids, use_cache=False).aux_loss
        loss.backward()
        losses.append(loss.item())
        grads.append(m.model.layers[0].mlp.gate.weight.grad.float())
    assert abs(losses[0] - losses[1]) < 0.05 * losses[1]
    assert sqnr(*grads) > SQNR_MIXTURE["auxiliary"]


def test_the_gate_of_a_shared_expert_does_not_depend_on_its_batch():
    """Both sides leave it to torch, whose vectorized loops compute their tails in another way."""
    values = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    values = values[~values.isnan()]
    whole = torch.sigmoid(values)
    for size in (1, 7, 31):
        parts = torch.cat([torch.sigmoid(part) for part in values.split(size)])
        assert torch.equal(parts, whole), size


def test_a_correction_bias_that_lost_bits_is_refused():
    model = prepared("glm4_moe")
    for name, buffer in corrections(model):
        model.get_submodule(name.rpartition(".")[0]).e_score_correction_bias = buffer.to(torch.bfloat16)
    with pytest.raises(ModelError, match=r"correction bias of a router: required torch\.float32.*found torch\.bfloat16"):
        model(input_ids=sequences(model)[0][None], use_cache=False)


@torch.no_grad()
def test_a_correction_bias_decides_who_is_chosen_and_not_the_weight():
    model = prepared("glm4_moe-odd")
    ids, family = sequences(model)[2][None], FAMILIES["glm4_moe"]
    routes = routes_of(model, family)
    model(input_ids=ids, use_cache=False)
    before = list(routes)
    for _, buffer in corrections(model):
        buffer[3] += 10
    routes.clear()
    model(input_ids=ids, use_cache=False)
    assert all((found == 3).any(-1).all() for found in routes)
    assert not all((found == 3).any(-1).all() for found in before)
