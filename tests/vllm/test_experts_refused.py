"""Experts that the trainer does not share with the rollout are refused: by a layer, and before an engine starts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import jetrl_patch
from jetrl_patch.errors import ModelError
from jetrl_patch.models.families import FAMILIES
from tests.models import config_of
from tests.vllm.expert_layer import E, empty_layer, method_of


@pytest.fixture(autouse=True)
def enabled() -> None:
    jetrl_patch.enable(precision="fp8-unified")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"scoring_func": "sigmoid"}, "scores by sigmoid"),
        ({"use_grouped_topk": True}, "by groups"),
        ({"e_score_correction_bias": torch.ones(E)}, "a bias that corrects scores"),
        ({"routed_scaling_factor": 2.5}, "scaled by 2.5"),
        ({"apply_router_weight_on_input": True}, "routing weights on the input"),
        ({"dp_size": 2}, "experts shared between engines"),
        ({"pcp_size": 2}, "experts shared between engines"),
        ({"enable_eplb": True}, "redundant experts"),
        ({"expert_placement_strategy": "round_robin"}, "placed by round_robin"),
    ],
)
def test_what_the_trainer_does_not_share_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=f"required SiLU, a router.*found .*{says}"):
        method_of(empty_layer(**changes))


@pytest.mark.parametrize(
    ("parallel", "keys", "says"),
    [
        ({"data_parallel_size": 2}, {}, "data_parallel_size=2"),
        ({"enable_eplb": True}, {}, "enable_eplb"),
        ({"expert_placement_strategy": "round_robin"}, {}, "expert_placement_strategy='round_robin'"),
        ({}, {"mlp_only_layers": [1]}, r"dense blocks \(mlp_only_layers\)"),
        ({}, {"decoder_sparse_step": 2}, r"dense blocks \(decoder_sparse_step\)"),
    ],
)
def test_an_engine_that_shares_or_moves_experts_is_refused(parallel: dict[str, Any], keys: dict[str, Any], says: str) -> None:
    required = "experts in FP8 in vLLM: required the model's routes, and experts in order"
    with pytest.raises(ModelError, match=f"{required}.*found {says}"):
        check_engine(parallel, "qwen3_moe", keys)


def test_random_routes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MOE_ROUTING_SIMULATION_STRATEGY", "uniform_random")
    with pytest.raises(ModelError, match=r"required the model's routes.*found VLLM_MOE_ROUTING_SIMULATION_STRATEGY"):
        check_engine({}, "qwen3_moe", {})


def check_engine(parallel: dict[str, Any], family: str, keys: dict[str, Any]) -> None:
    from jetrl_patch.adapters.vllm.engine import _check_experts

    settings = {
        "tensor_parallel_size": 1,
        "data_parallel_size": 1,
        "enable_expert_parallel": False,
        "enable_eplb": False,
        "expert_placement_strategy": "linear",
        **parallel,
    }
    hf_config = config_of(family, **keys)
    model = SimpleNamespace(hf_config=hf_config, hf_text_config=hf_config)
    vllm_config: Any = SimpleNamespace(parallel_config=SimpleNamespace(**settings), model_config=model)
    _check_experts(vllm_config, FAMILIES[family])


@pytest.mark.parametrize("family", ["qwen3_moe", "olmoe", "qwen2_moe", "mixtral", "glm4_moe"])
def test_an_engine_whose_ranks_cut_a_block_or_an_expert_is_refused(family: str) -> None:
    key = "intermediate_size" if family in ("olmoe", "mixtral") else "moe_intermediate_size"
    by_experts = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    check_engine({}, family, {key: 200})
    check_engine(by_experts, family, {key: 200})
    check_engine({"tensor_parallel_size": 2}, family, {key: 256})
    with pytest.raises(ModelError, match=r"each of 2 tensor parallel ranks holds whole blocks of 128, found 384\. Use expert"):
        check_engine({"tensor_parallel_size": 2}, family, {key: 384})
    with pytest.raises(ModelError, match=r"required a number that 3 expert parallel ranks divide, found 8 experts"):
        check_engine({**by_experts, "tensor_parallel_size": 3}, family, {})
