"""Which models verl's Megatron engine can train in FP8, and over which ranks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from jetrl_patch.adapters.verl import megatron, megatron_model
from jetrl_patch.config import Config
from jetrl_patch.errors import ModelError
from tests.models import config_of

EXACT, LINEAR = Config(), Config(align="linear", backend="te")


def sizes(tp: int, cp: int = 1) -> megatron.Sizes:
    """Whole experts, sequence parallelism, Megatron-Bridge."""
    return megatron.Sizes(tp, cp, ep=1, expert_tp=1, scattered=True, old_bridge=False)


def test_a_mixture_holds_whole_experts_on_each_rank():
    hf_config = config_of("qwen3_moe", head_dim=128)
    one, two = sizes(1)._replace(scattered=False, old_bridge=True), sizes(2)
    for accepted in (one, two, one._replace(ep=4), two._replace(ep=2)):
        megatron.check_model(hf_config, accepted, EXACT)
    for refused, match in (
        (two._replace(expert_tp=2), "2 ranks for each. Set megatron.expert_tensor_parallel_size=1"),
        (one._replace(ep=3), "required a divisor of its 8 experts, found 3 expert-parallel ranks. Change megatron.expert_model"),
        (two._replace(scattered=False), "the same tokens on each. Set megatron.sequence_parallel=true"),
        (two._replace(old_bridge=True), "mbridge with 2 ranks. Set megatron.vanilla_mbridge=false"),
    ):
        with pytest.raises(ModelError, match=match):
            megatron.check_model(hf_config, refused, EXACT)
    with pytest.raises(ModelError, match="required align='exact'"):
        megatron.check_model(hf_config, one, LINEAR)
    with pytest.raises(ModelError, match="moe_intermediate_size=192"):
        megatron.check_model(config_of("qwen3_moe", head_dim=128, moe_intermediate_size=192), one, EXACT)
    assert megatron.Sizes.of({"tensor_model_parallel_size": 2, "sequence_parallel": True}.get) == two._replace(expert_tp=2)


def test_blocks_of_shared_experts_and_dense_blocks_belong_to_one_rank():
    hf_config = config_of("glm4_moe", head_dim=128)
    megatron.check_model(hf_config, sizes(1), EXACT)
    with pytest.raises(ModelError, match="found 1 shared experts of 128 over 2 ranks"):
        megatron.check_model(hf_config, sizes(2), EXACT)
    two = {"head_dim": 128, "n_shared_experts": 2}
    megatron.check_model(config_of("glm4_moe", **two), sizes(2), EXACT)
    odd = {**two, "intermediate_size": 384}
    megatron.check_model(config_of("glm4_moe", **odd, first_k_dense_replace=0), sizes(2), EXACT)
    with pytest.raises(ModelError, match="found intermediate_size=384 over 2 ranks"):
        megatron.check_model(config_of("glm4_moe", **odd, first_k_dense_replace=1), sizes(2), EXACT)


@pytest.mark.parametrize(
    ("given", "rate"),
    [
        ({}, 1e-3),
        ({"num_moe_experts": None}, 0.0),
        ({"moe_router_enable_expert_bias": False}, 0.0),
        ({"moe_router_bias_update_rate": 0}, 0.0),
    ],
)
def test_a_bridge_that_would_move_the_bias_of_routers(given, rate):
    usual = {"num_moe_experts": 8, "moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": 1e-3}
    assert megatron_model.bias_rate(SimpleNamespace(**usual | given)) == rate


def test_latent_attention():
    hf_config = config_of("deepseek_v3", n_shared_experts=2)
    for accepted in (sizes(1), sizes(1, cp=4), sizes(2, cp=2), sizes(2)._replace(ep=2)):
        megatron.check_model(hf_config, accepted, EXACT)
    for refused, match in (
        (sizes(2, cp=4), "required whole heads on each rank, found 4 heads over 8 ranks"),
        (sizes(1)._replace(old_bridge=True), "required Megatron-Bridge, found mbridge. Set megatron.vanilla_mbridge=false"),
        (sizes(4), "4 heads of 64 over 4 ranks"),
    ):
        with pytest.raises(ModelError, match=match):
            megatron.check_model(hf_config, refused, EXACT)
    with pytest.raises(ModelError, match="required align='exact'"):
        megatron.check_model(hf_config, sizes(1), LINEAR)


@pytest.mark.parametrize(
    ("options", "tp", "match"),
    [
        ({}, 1, "head_dim=64"),
        ({"head_dim": 128, "intermediate_size": 640}, 2, "intermediate_size=640 over 2 ranks"),
        ({"head_dim": 128}, 8, "intermediate_size=512 over 8 ranks"),
    ],
)
def test_a_block_that_would_hold_two_layers(options, tp, match):
    with pytest.raises(ModelError, match=match):
        megatron.check_model(config_of("qwen3", **options), sizes(tp), LINEAR)
    megatron.check_model(config_of("qwen3", head_dim=128), sizes(4), LINEAR)


def test_heads_narrower_than_a_block():
    """In exact mode they need not fill it, but no rank may cut one."""
    narrow = config_of("qwen3", num_attention_heads=8, num_key_value_heads=4)
    assert narrow.head_dim == 64
    for accepted in (sizes(1), sizes(2), sizes(1, cp=4)):
        megatron.check_model(narrow, accepted, EXACT)
    with pytest.raises(ModelError, match="found 4 key heads of 64 over 4 ranks"):
        megatron.check_model(narrow, sizes(4), EXACT)
    with pytest.raises(ModelError, match="found 8 heads of 64 over 8 ranks, 4 key heads of 64 over 8 ranks, intermediate"):
        megatron.check_model(narrow, sizes(8), EXACT)


@pytest.mark.parametrize(("tp", "cp"), [(4, 1), (2, 2)])
def test_ranks_that_would_share_a_key_head(tp, cp):
    with pytest.raises(ModelError, match="whole key heads on each rank, found 2 key heads over 4 ranks"):
        megatron.check_model(config_of("qwen3", head_dim=128), sizes(tp, cp), EXACT)
    megatron.check_model(config_of("qwen3", head_dim=128), sizes(1, 2), EXACT)
