"""Latent attention in the trainer: which layers are FP8, gradients against FP64, and how a rollout may be split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import jetrl_patch
from jetrl_patch.cli.parity.explain import _make_stock
from jetrl_patch.config import Config
from jetrl_patch.errors import ModelError
from jetrl_patch.exact.modules import check_family
from jetrl_patch.fp8.linear import Fp8Linear
from jetrl_patch.models.families import FAMILIES
from jetrl_patch.models.structure import check_structure
from jetrl_patch.trainer.preflight import check_checkpoint, needed_ep
from jetrl_patch.trainer.prepare import prepare_model

from ..fp8.thresholds import SQNR_MIXTURE, sqnr
from ..models import build, config_of
from .stock import follow, gradients, routes_of, texts

pytestmark = pytest.mark.pins

LINEAR, ROLLOUT = Config(precision="fp8-unified", align="linear"), Config(precision="fp8-rollout")
FAMILY = "deepseek_v3"


@pytest.mark.parametrize("options", [{}, {"q_lora_rank": None}], ids=["compressed queries", "plain queries"])
def test_gradients_against_fp64(options: dict[str, Any]) -> None:
    jetrl_patch.enable(precision="fp8-unified", align="linear")
    ours, plain, family = build(FAMILY, **options), build(FAMILY, **options).double(), FAMILIES[FAMILY]
    layers = prepare_model(ours, LINEAR.resolved())
    attention = ours.model.layers[1].self_attn
    linears = {name for name, module in attention.named_children() if isinstance(module, nn.Linear)}
    assert {name for name in linears if type(getattr(attention, name)) is not Fp8Linear} == {"kv_b_proj"}
    assert not any("kv_b_proj" in layer for layer in layers)
    given, routes = texts(ours), routes_of(ours, family)
    found = gradients(ours, given)
    follow(plain, family, routes)
    expected = gradients(plain, given)
    assert found.keys() == expected.keys()
    parts = {"experts": ".mlp.experts.", "router": ".mlp.gate.", "shared": ".mlp.shared_expert", "": "kv_b_proj", " ": ""}
    for part, inside in parts.items():
        names = [name for name in found if inside in name]
        reached = sqnr(*(torch.cat([grads[name].flatten() for name in names]) for grads in (found, expected)))
        assert names and reached > SQNR_MIXTURE[part.strip()], (inside, reached)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"scoring_func": None}, r"scoring_func='sigmoid' \(vLLM's default is a softmax\), found no scoring_func\. Set it in"),
        ({"scoring_func": "softmax"}, r"found scoring_func='softmax'\. Set it in config\.json, or use precision='bf16'"),
        ({"topk_method": None}, r"topk_method='noaux_tc' \(.*found no topk_method"),
        ({"topk_method": "group_limited_greedy"}, "found topk_method='group_limited_greedy'"),
        ({"moe_layer_freq": 2}, r"moe_layer_freq=1 \(.*have experts\), found moe_layer_freq=2"),
        ({"attention_bias": True}, r"leaves out the biases of attention\), found attention_bias=True"),
        ({"tie_word_embeddings": True}, "found tie_word_embeddings=True"),
        ({"rope_interleave": False}, r"neighboring numbers of a head\), found rope_interleave=False"),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
            r"as YaRN\), found rope_parameters\.rope_type='linear'",
        ),
        ({"index_topk": 64}, r"not sparse\), found index_topk=64"),
    ],
)
@pytest.mark.parametrize("config", [LINEAR, ROLLOUT], ids=["linear", "fp8-rollout"])
def test_a_setting_by_which_one_side_computes_otherwise_is_refused(
    tmp_path: Path, config: Config, options: dict[str, Any], says: str
) -> None:
    made = config_of(FAMILY, **{key: value for key, value in options.items() if value is not None})
    for key, value in options.items():
        if value is None:
            delattr(made, key)
    made.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=rf"model_type='{FAMILY}' with a quantized rollout: required .*{says}") as caught:
        check_checkpoint(tmp_path, config, 1)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300
    assert check_checkpoint(tmp_path, Config(precision="bf16"), 1) is None


def test_a_block_that_predicts_a_second_token_is_neither_demanded_nor_refused(tmp_path: Path) -> None:
    config_of(FAMILY, num_nextn_predict_layers=1).save_pretrained(tmp_path)
    assert check_checkpoint(tmp_path, LINEAR, 1).num_nextn_predict_layers == 1


def test_exact_mode_is_accepted_and_int8_is_refused() -> None:
    exact, int8 = Config(precision="fp8-unified"), Config(precision="int8-rollout")
    check_structure(config_of(FAMILY), exact)
    check_family(config_of(FAMILY))
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
    check_family(config_of(FAMILY, rope_parameters=yarn))
    with pytest.raises(ModelError, match=r"rope type 'dynamic' \(expected one of default, llama3, linear, yarn\)"):
        check_family(config_of("qwen3", rope_parameters={**yarn, "rope_type": "dynamic"}))
    with pytest.raises(ModelError, match="does not quantize experts"):
        check_structure(config_of(FAMILY), int8)


def test_exact_mode_refuses_what_its_attention_does_not_compute(tmp_path: Path) -> None:
    jetrl_patch.enable(precision="fp8-unified")
    model = build(FAMILY)
    with pytest.raises(ModelError, match="required a CPU, or a GPU with Triton kernels"):
        prepare_model(model, Config(precision="fp8-unified", backend="torch").resolved(), device_type="cuda")
    config_of(FAMILY).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"required a BF16 cache .*found kv_cache='fp8'"):
        check_checkpoint(tmp_path, Config(precision="fp8-unified", kv_cache="fp8"), 1)
    prepare_model(model, Config(precision="fp8-unified").resolved())
    ids = torch.arange(3, 13)[None]
    cache = model(input_ids=ids, use_cache=True).past_key_values  # of the latents, filled in one step
    with pytest.raises(ModelError, match="got 1 queries and 11 keys of a cache"):
        model(input_ids=ids[:, :1], past_key_values=cache)


@torch.no_grad()
def test_explain_takes_the_absorbed_form_away_and_gives_it_back() -> None:
    jetrl_patch.enable(precision="fp8-unified")
    model, ids = build(FAMILY), torch.arange(3, 60)[None]
    prepare_model(model, Config(precision="fp8-unified").resolved())
    exact = model(input_ids=ids, use_cache=False).logits
    restore = _make_stock(model, "attention")
    assert type(model.model.layers[0].self_attn).__name__ == FAMILIES[FAMILY].attention
    stock = model(input_ids=ids, use_cache=False).logits
    assert not torch.equal(stock, exact) and sqnr(stock, exact) > 10
    restore()
    assert torch.equal(model(input_ids=ids, use_cache=False).logits, exact)


def test_how_a_rollout_may_be_split(tmp_path: Path) -> None:
    """DeepSeek-V3's widths divide by any number of ranks up to 16. Of Moonlight's experts two ranks would cut a block."""
    sizes = {"num_hidden_layers": 2, "vocab_size": 64}
    large = {
        "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256,
        "num_attention_heads": 128, "num_key_value_heads": 128, "qk_nope_head_dim": 128, "v_head_dim": 128, "q_lora_rank": 1536,
    }  # fmt: skip
    config_of(FAMILY, **sizes, **large).save_pretrained(tmp_path / "large")
    assert needed_ep(tmp_path / "large", LINEAR, 16) == 1
    assert check_checkpoint(tmp_path / "large", LINEAR, 16)
    small = {
        "hidden_size": 2048, "intermediate_size": 11264, "moe_intermediate_size": 1408, "n_routed_experts": 64,
        "n_shared_experts": 2, "num_attention_heads": 16, "num_key_value_heads": 16,
        "qk_nope_head_dim": 128, "v_head_dim": 128, "q_lora_rank": None,
    }  # fmt: skip
    moonlight = config_of(FAMILY, **sizes, **small)
    moonlight.save_pretrained(tmp_path / "small")
    assert FAMILIES[FAMILY].split_layers(moonlight)["model.layers.1.self_attn.o_proj"] == 16 * 128
    assert needed_ep(tmp_path / "small", LINEAR, 2) == 2
    assert check_checkpoint(tmp_path / "small", LINEAR, 2, 2)
    with pytest.raises(ModelError, match=r"size 4 cuts a block of 128 in 1 layers: .*shared_experts\.down_proj \(K = 2816\)"):
        check_checkpoint(tmp_path / "small", LINEAR, 4, 4)
