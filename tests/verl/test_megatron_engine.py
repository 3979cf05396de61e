"""verl's real Megatron engine on the CPU, in exact mode: its log-probs are those of the exact Hugging Face model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.forks import facts, run
from tests.fp8.thresholds import SQNR_GRADIENT
from tests.megatron import environ, needs_megatron
from tests.models import VARIANTS
from tests.verl.run_verl import make_task

pytestmark = needs_megatron

SCRIPT = Path(__file__).with_name("megatron_engine_script.py")
BESIDE_FSDP = SCRIPT.with_name("megatron_beside_fsdp_script.py")
TOKENS = 118
#: the models' settings, by name
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 128, "num_hidden_layers": 4},
    "qwen2": {"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen2-narrow": {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4},
    "llama": {
        "head_dim": 128,
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "qwen3_moe": {"head_dim": 128},
    "glm4_moe": {"head_dim": 128, "attention_bias": True},
    "deepseek_v3": {"n_shared_experts": 2, **VARIANTS["deepseek_v3"][1]},  # YaRN
    "deepseek_v3-plain": {"q_lora_rank": None, "num_hidden_layers": 4},
}  # fmt: skip
#: quantized layers of the models
LAYERS = {
    "qwen3": 28, "qwen2": 21, "qwen2-narrow": 21, "llama": 21, "qwen3_moe": 84, "glm4_moe": 69, "deepseek_v3": 69,
    "deepseek_v3-plain": 96,
}  # fmt: skip
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
#: what verl's scripts set for Megatron's own experts, and routers
OF_MEGATRONS_EXPERTS = {
    "moe_grouped_gemm": True, "moe_router_dtype": "fp32", "moe_enable_deepep": True, "moe_token_dispatcher_type": "flex",
    "moe_shared_expert_overlap": False, "moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0,
}  # fmt: skip
#: losses of routers, large enough to be seen in the norm of the gradients
BALANCED = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1.0, "moe_z_loss_coeff": 0.1}
#: verl's older bridge, instead of Megatron-Bridge; verl leaves sequence parallelism to it
MBRIDGE = {"vanilla_mbridge": True}
#: verl computes log-probs from hidden states
FUSED = {"use_fused_kernels": True}
#: name -> model, ranks, what the script is asked
RUNS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "one rank": ("qwen3", 1, {"pad": True, "plugin": {"scale_format": "fp32", "head_dtype": "float32", "kv_cache": "fp8"}}),
    "sequence parallelism, limited samples, resumed": (
        "llama", 2, {"tp": 2, "limits": True, "optimizer": {"use_checkpoint_opt_param_scheduler": True}},
    ),
    "tensor parallelism, fused": ("qwen2", 2, {"tp": 2, "engine": {"sequence_parallel": False, "param_offload": True, **FUSED}}),
    "a rollout of four ranks": (
        "qwen3", 2,
        {"tp": 2, "rollout_tp": 4, "temperature": [1.0, 0.7, 0.9, 1.3, 1.0, 0.5],
         "engine": {"override_transformer_config": RECOMPUTE, **MBRIDGE}},
    ),
    "stages": (
        "qwen2", 2, {"pp": 2, "engine": {"override_transformer_config": {"num_layers_in_first_pipeline_stage": 1}, **MBRIDGE}},
    ),
    "interleaved stages, fused": (
        "qwen3", 2, {"pp": 2, "micro": 3, "engine": {"virtual_pipeline_model_parallel_size": 2, **FUSED, **MBRIDGE}}
    ),
    "tied weights in two stages": (
        "qwen2", 2, {"pp": 2, "engine": {"override_transformer_config": {"num_layers_in_first_pipeline_stage": 1}}},
    ),
    "context parallelism, limited samples": (
        "llama", 2, {"limits": True, "engine": {"context_parallel_size": 2, "override_transformer_config": RECOMPUTE}},
    ),
    "experts, tensor parallelism, fused": (
        "qwen3_moe", 2,
        {"tp": 2, "rollout_ep": 2, "temperature": [0.7] * 6, "engine": {"expert_tensor_parallel_size": 1, **FUSED}},
    ),
    "context parallelism, fused": ("llama", 2, {"engine": {"context_parallel_size": 2, **FUSED}}),
    "one rank, fused": ("qwen3", 1, {"engine": FUSED, "plugin": {"head_dtype": "float32"}}),
    "experts that ranks share, resumed": (
        "qwen3_moe", 2,
        {"tp": 2, "rollout_ep": 2, "engine": {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1,
         "override_transformer_config": RECOMPUTE}, "optimizer": {"use_checkpoint_opt_param_scheduler": True}},
    ),
    "experts that ranks with other samples share": (
        "qwen3_moe", 2,
        {"micro": 3, "engine": {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1,
         "override_transformer_config": OF_MEGATRONS_EXPERTS, **MBRIDGE}},
    ),
    "experts in stages, balanced": (
        "qwen3_moe", 2,
        {"pp": 2, "engine": {"override_transformer_config": {"num_layers_in_first_pipeline_stage": 1, **BALANCED}, **MBRIDGE}},
    ),
    "a dense block before experts, and shared ones": (
        "glm4_moe", 2,
        {"micro": 3, "engine": {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1, **MBRIDGE}},
    ),
    "latent attention, resumed": (
        "deepseek_v3", 2,
        {"tp": 2, "rollout_ep": 2, "engine": {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1,
         "override_transformer_config": RECOMPUTE}, "optimizer": {"use_checkpoint_opt_param_scheduler": True}},
    ),
    "latent attention, context parallelism": (
        "deepseek_v3", 2, {"engine": {"context_parallel_size": 2, "override_transformer_config": RECOMPUTE}},
    ),
    "latent attention in interleaved stages": (
        "deepseek_v3-plain", 2, {"pp": 2, "micro": 3, "engine": {"virtual_pipeline_model_parallel_size": 2}},
    ),
    # with scales that are powers of two, the wrong neighbors in a block could have the right scale
    "heads narrower than a block": ("qwen2-narrow", 2, {"tp": 2, "plugin": {"scale_format": "fp32"}}),
    "data parallelism": ("qwen3", 2, {"micro": 3, "engine": {"optimizer_offload": True}}),
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    made: dict[tuple[str, bool], str] = {}

    def make(family: str, fill: bool = False) -> str:
        if (family, fill) not in made:
            folder = make_task(tmp_path_factory.mktemp(family), family.partition("-")[0], fill=fill, **MODELS[family])
            made[family, fill] = str(folder / "model")
        return made[family, fill]

    return make


def ask(folder: str, ranks: int, asked: dict[str, Any]) -> dict[str, Any]:
    return facts(SCRIPT, ranks, folder, json.dumps(asked), environ=environ())


#: runs that share their code with others
MORE = (
    "context parallelism, fused", "one rank, fused", "a dense block before experts, and shared ones",
    "latent attention in interleaved stages",
)  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in MORE else ()) for name in RUNS])
def test_log_probs_gradients_and_what_is_sent(model, tmp_path, name):
    family, ranks, asked = RUNS[name]
    resumed = "resumed" in name
    found = ask(model(family), ranks, asked | ({"save": str(tmp_path / "saved")} if resumed else {}))
    assert found["loaded"]
    assert found["equal"] == found["tokens"] == [TOKENS, TOKENS]  # before an update, and after one
    for own, theirs in found["norms"]:
        assert own == pytest.approx(theirs, rel=0.005)
    assert found["layers"] == LAYERS[family]
    assert found["bytes"] and found["scales"] and found["rest"] and found["complete"] and found["fraction"] < 0.51
    assert found.get("finite", True)
    if resumed:
        assert found["resumed"] and found["continued"] and found["refused"]
    for (own, _), without in zip(found["norms"], found.get("unbalanced", ())):
        assert own > 1.05 * without
    if asked.get("pad"):  # Megatron trains every row of the embedding, a row of zeros too
        assert found["norms"][0][0] > 100 * found["without pad row"][0]


@pytest.mark.parametrize("control", ["rounded parts", "added exponentials"])
def test_what_megatron_does_itself_is_not_equal(model, control):
    found = ask(model("qwen3", fill=True), 2, {"tp": 2, "steps": 1, "control": control})
    assert found["equal"][0] < found["tokens"][0] == TOKENS


@pytest.mark.slow
@pytest.mark.parametrize("split", ["tp", "pp"])
def test_five_steps_beside_fsdp2(model, split):
    """Megatron's merged layers round the gradients of their inputs once, which tips single FP8 values over."""
    found = facts(BESIDE_FSDP, 2, model("qwen3"), json.dumps({split: 2}), environ=environ())
    assert found["megatron and fp64"] > SQNR_GRADIENT["fp8"] and found["fsdp2 and fp64"] > SQNR_GRADIENT["fp8"]
    assert found["megatron and fp64"] == pytest.approx(found["fsdp2 and fp64"], abs=0.2)
    assert found["megatron and fsdp2"] > 20 and found["worst"] > 18
    assert len(found["norms"]) == 5
    (first, its), *later = found["norms"]
    assert first == pytest.approx(its, rel=0.005)
    for ours, theirs in later:  # of weights that differ more with each step, by other amounts on other processors
        assert ours == pytest.approx(theirs, rel=0.05)
    # Adam's first step moves every weight by the learning rate; where the signs of noise differ, twice that, rounded to BF16
    assert found["equal"] > 0.985 * found["weights"] and found["apart"] < 2.5


def test_layers_without_tensor_parallel_attributes_are_refused(model):
    """The driver refuses the setting; a worker that gets it stops before a wrong gradient."""
    asked = {"tp": 2, "engine": {"override_transformer_config": {"perform_initialization": False}}}
    done = run(SCRIPT, model("qwen3"), json.dumps(asked), ranks=2, environ=environ())
    assert done.returncode and "ModelError" in done.stderr and "tensor-parallel attributes" in done.stderr
