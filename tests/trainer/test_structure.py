"""Models that no quantizing mode handles are refused by their config.json, before anything is loaded."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from jetrl_patch.config import Config
from jetrl_patch.errors import ModelError
from jetrl_patch.fp8.convert import select_layers
from jetrl_patch.models.structure import EXPERTS, check_structure
from jetrl_patch.trainer.preflight import check_checkpoint, checkpoint_problems
from jetrl_patch.trainer.source import convert
from tests.models import config_of

EXACT, LINEAR = Config(precision="fp8-unified"), Config(precision="fp8-unified", align="linear")
QUANTIZED = [EXACT, LINEAR, Config(precision="fp8-rollout"), Config(precision="int8-rollout")]
SIZES = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 384}


def experts() -> Any:
    """A mixture without a record."""
    from transformers import FlexOlmoConfig

    return FlexOlmoConfig(**SIZES, num_key_value_heads=2, num_experts=4)


def known_experts() -> Any:
    return config_of("qwen3_moe")


def vision() -> Any:
    """A vision tower without a record."""
    from transformers import Qwen2VLConfig

    return Qwen2VLConfig(text_config={**SIZES, "num_key_value_heads": 2})


def quantized() -> Any:
    return config_of("qwen3", quantization_config={"quant_method": "fp8"})


def latent() -> Any:
    from transformers import DeepseekV2Config

    return DeepseekV2Config(**SIZES, n_routed_experts=0, kv_lora_rank=128)


@pytest.mark.parametrize("config", QUANTIZED, ids=lambda config: f"{config.precision}-{config.resolved_align}")
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (experts, r"required a dense model.*found num_experts=4\. Use a dense"),
        (vision, r"required one text model, or .*found text_config and vision_config\."),
        (latent, r"vLLM transforms MLA's weights once.*found kv_lora_rank=128\."),
        (quantized, r"required BF16 weights.*found a quantization_config with quant_method='fp8'\. Use a BF16"),
    ],
)
def test_a_folder_is_refused_by_name_in_every_quantizing_mode(tmp_path: Path, config: Config, make: Any, says: str) -> None:
    make().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=says) as caught:
        check_checkpoint(tmp_path, config, 1)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 350
    assert check_checkpoint(tmp_path, Config(precision="bf16"), 1) is None


def test_a_checkpoint_that_modelopt_quantized_is_refused_with_the_file_that_says_so(tmp_path: Path) -> None:
    """transformers does not read the file, so the run would start, and vLLM would refuse it later."""
    config_of("llama").save_pretrained(tmp_path)
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}')
    for config in QUANTIZED:
        with pytest.raises(ModelError, match=r"hf_quant_config\.json: required BF16 weights.*found quant_algo='FP8', kv_cache"):
            check_checkpoint(tmp_path, config, 1)


def test_state_space_blocks_are_refused_as_what_they_are() -> None:
    """Nemotron-H: its class has a default for experts, which no block has."""
    from transformers import NemotronHConfig

    config = NemotronHConfig(num_hidden_layers=4, hybrid_override_pattern="M-M*")
    with pytest.raises(ModelError, match=r"required blocks of attention and MLP \(state-space.*found mamba_num_heads=\d+\."):
        check_structure(config, LINEAR)


def test_a_remote_model_is_refused_in_the_worker_that_has_loaded_it() -> None:
    for made in (experts(), vision()):
        with pytest.raises(ModelError, match="dense text model"):
            convert(SimpleNamespace(config=made), LINEAR, {}, rollout_tp=1, device_type="cpu")


@pytest.mark.parametrize("config", QUANTIZED, ids=lambda config: f"{config.precision}-{config.resolved_align}")
def test_a_mixture_with_a_record_is_accepted_where_its_experts_are_fp8(tmp_path: Path, config: Config) -> None:
    known_experts().save_pretrained(tmp_path)
    if config.fp8_rollout:
        assert check_checkpoint(tmp_path, config, 1).model_type == "qwen3_moe"
        with pytest.raises(ModelError, match=r"whole blocks of 128, found 128\. Use expert parallelism"):
            check_checkpoint(tmp_path, config, 2)
        assert check_checkpoint(tmp_path, config, 2, 2).model_type == "qwen3_moe"
        return
    says = rf"{config.precision}.*with scales per channel does not quantize experts.*found num_experts=8\."
    with pytest.raises(ModelError, match=says):
        check_checkpoint(tmp_path, config, 1)


@pytest.mark.parametrize("config", [EXACT, LINEAR], ids=["exact", "linear"])
@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        *((family, "sliding_window", 16) for family in ("llama", "seed_oss", "granite", "olmoe", "glm4_moe")),
        *((family, "partial_rotary_factor", 0.5) for family in ("qwen2", "qwen3", "llama", "mistral", "granite")),
        *((family, "is_causal", False) for family in ("qwen2", "llama", "mistral", "deepseek_v3", "qwen3_next", "mixtral")),
        *((family, "logit_scale", 2.0) for family in ("llama", "granite", "mistral")),
        *((family, "bias", True) for family in ("llama", "granite", "mistral")), ("llama", "qkv_bias", True),
        ("mistral", "qkv_bias", True), ("qwen3_moe", "shared_expert_intermediate_size", 128),
        *((family, "attention_bias", True) for family in ("qwen3", "qwen3_moe", "mistral", "olmoe", "qwen3_next")),
        ("qwen2", "qk_norm", True), ("seed_oss", "attention_bias", False), ("seed_oss", "mlp_bias", True),
        ("granite", "layer_types", ["full_attention"] * 3), ("granite", "layer_rope_theta", [1e4] * 3),
        ("olmoe", "clip_qkv", 8.0), ("olmoe", "norm_topk_prob", True), ("qwen2_moe", "qkv_bias", False),
        ("qwen3_next", "attn_output_gate", False), ("olmoe", "rms_norm_eps", 1e-6),
        *((family, "hidden_act", "gelu") for family in ("mixtral", "olmoe")), ("llama", "hidden_act", "swish"),
        *((family, "head_dim", 128) for family in ("qwen2", "qwen2_moe", "olmoe", "deepseek_v3")),
        ("llama", "architectures", ["LlamaForSequenceClassification"]),
    ],
)  # fmt: skip
def test_a_setting_that_one_side_ignores_is_refused(tmp_path: Path, config: Config, family: str, key: str, value: Any) -> None:
    """vLLM windows the attention of any model that names a window, and rotates part of a head; these trainers do neither."""
    config_of(family).save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**settings, key: value}))
    with pytest.raises(ModelError, match=f"required [a-z_.]*{key}="):
        check_checkpoint(tmp_path, config, 1)


@pytest.mark.parametrize("key", ["mrope_section", "full_attention", "rope_dim", "attn_factor", "mscale", "attention_factor"])
def test_a_rotary_embedding_that_one_side_ignores_is_refused(key: str) -> None:
    config = config_of("mistral")
    check_structure(config, LINEAR)
    config.rope_parameters = {**config.rope_parameters, key: [8, 12, 12]}
    with pytest.raises(ModelError, match=f"required rope_parameters.{key}=None"):
        check_structure(config, LINEAR)


@pytest.mark.parametrize(("key", "value", "says"), [
    ("is_causal", False, "required is_causal=True"),  # which exact mode does not cover either
    ("architectures", None, "architectures: required the name of its class"),
    ("compression_config", {"quant_method": "fp8"}, "quantization_config with quant_method='fp8'"),
    ("quantization_config", {"quant_algo": "FP8", "producer": {"name": "modelopt"}}, "quantization_config with quant_algo='FP8'"),
    ("quantization_config", {"producer": 1, "group_0": 2}, "quantization_config with the keys producer, group_0"),
    ("partial_rotary_factor", 1.0, "as in rope_parameters .*found partial_rotary_factor=1.0"),
    ("head_dtype", "float32", "head_dtype='float32'.*only vLLM reads it.*Remove it"),
])  # fmt: skip
def test_what_is_refused_is_said_once(tmp_path: Path, key: str, value: Any, says: str) -> None:
    config_of("glm4_moe" if "partial" in key else "llama").save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**settings, key: value}))
    (problem,) = checkpoint_problems(tmp_path, EXACT, 1)
    assert re.search(says, str(problem))


@pytest.mark.parametrize(("family", "key", "value"), [("phi3", "partial_rotary_factor", 0.5), ("mistral", "sliding_window", 16)])
def test_a_setting_that_both_sides_read_is_not(tmp_path: Path, family: str, key: str, value: Any) -> None:
    config_of(family, **{key: value}).save_pretrained(tmp_path)
    assert check_checkpoint(tmp_path, LINEAR, 1).model_type == family


def test_a_count_of_none_is_dense() -> None:
    for key in EXPERTS:
        with pytest.raises(ModelError, match=f"{key}=4"):
            check_structure(SimpleNamespace(**{key: 4}), EXACT)
    for dense in (None, 0, []):
        check_structure(SimpleNamespace(num_experts=dense, kv_lora_rank=None, quantization_config={}), EXACT)


def test_stacked_matrices_are_found_without_a_key_in_the_configuration() -> None:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_up_proj = nn.Parameter(torch.empty(4, 128, 128))

    model = nn.Module()
    model.layers = nn.ModuleList([nn.ModuleDict({"q_proj": nn.Linear(128, 128), "conv": nn.Conv1d(8, 8, 3)})])
    assert select_layers(model) == ["layers.0.q_proj"]
    model.layers[0]["experts"] = Stack()
    with pytest.raises(ModelError, match=r"found layers\.0\.experts\.gate_up_proj of shape \[4, 128, 128\]"):
        select_layers(model)


def test_trusting_remote_code_leaves_nothing_unchecked(tmp_path: Path) -> None:
    dense = config_of("qwen3")
    dense.save_pretrained(tmp_path)
    assert check_checkpoint(tmp_path, EXACT, 1, trust_remote_code=True).model_type == "qwen3"
    with pytest.raises(ModelError, match="cuts a block"):
        check_checkpoint(tmp_path, EXACT, 4, trust_remote_code=True)
    settings = json.loads((tmp_path / "config.json").read_text())
    settings["auto_map"] = {"AutoConfig": "code.Mine", "AutoModelForCausalLM": "code.MyModel"}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match=r"found auto_map for AutoConfig, AutoModelForCausalLM in config\.json\. Remove"):
        check_checkpoint(tmp_path, LINEAR, 1, trust_remote_code=True)
    assert check_checkpoint(tmp_path, LINEAR, 1).model_type == "qwen3"  # nobody runs that code then


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, r"config\.json in .*required a configuration that transformers knows"),
        ("{", "required a configuration that transformers knows"),
        ('{"model_type": "nobody_knows"}', "required a configuration that transformers knows"),
        ('{"model_type": "vit"}', "required a causal language model"),
        ('{"model_type": "llama", "rope_scaling": {"type": "su"}}', "that transformers can build, found KeyError: 'su'"),
    ],
)
@pytest.mark.parametrize("trust", [False, True])
def test_what_transformers_cannot_read_is_one_line(tmp_path: Path, text: str | None, says: str, trust: bool) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=says) as caught:
        check_checkpoint(tmp_path, LINEAR, 1, trust_remote_code=trust)
    assert "\n" not in str(caught.value)
