"""The table of model families: no other product file names a family, and its class names are right."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from jetrl_patch.errors import ModelError
from jetrl_patch.exact.modules import check_family
from jetrl_patch.models.families import (
    ABSORBED,
    FAMILIES,
    LLAMA_LIKE,
    MERGED,
    ROW_PARALLEL,
    Family,
    covering,
    family_of,
    titles,
)
from jetrl_patch.models.family import width

from .models import config_of
from .test_boundaries import ROOT, loaded_by, python_files
from .vision_models import environ, needs_images

TABLE = ROOT / "jetrl_patch" / "models" / "families.py"
#: family -> the only other file that names it, because vLLM has a class or verl a module of that name
NAMED_ELSEWHERE = {
    "llama": "adapters/vllm/ops.py",
    "qwen3_vl": "adapters/verl/vision.py",
    "qwen3_5": "adapters/verl/vision.py",
    "glm4v": "adapters/verl/vision.py",
}


def names_of(family: Family) -> re.Pattern[str]:
    """Matches the model type as a word and the class prefix at the start of one: "qwen2", "Qwen2RMSNorm", "Phi-3"."""
    spelled = {family.prefix, family.prefix.replace("Phi3", "Phi-?3")}
    return re.compile(rf"\b({family.model_type}\b|{'|'.join(spelled)})")


def files_that_name(family: Family) -> set[str]:
    paths = {*python_files("jetrl_patch"), *python_files("adapters")} - {TABLE}
    return {str(path.relative_to(ROOT)) for path in paths if names_of(family).search(path.read_text())}


def test_the_table_loads_no_framework() -> None:
    found = loaded_by("import jetrl_patch.models.families")
    assert not found & {"torch", "transformers", "vllm"}


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.model_type)
def test_no_second_table(family: Family) -> None:
    assert files_that_name(family) == {file for name, file in NAMED_ELSEWHERE.items() if name == family.model_type}


def test_a_second_table_would_be_found() -> None:
    for text in ('("qwen2", "llama")', 'NORMS = ("Qwen2RMSNorm",)', "# for Phi-3 alone", 'if kind == "mistral":'):
        assert any(names_of(family).search(text) for family in FAMILIES.values()), text
    assert not any(names_of(family).search('rope_type != "llama3"') for family in FAMILIES.values())


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.model_type)
def test_transformers_has_the_classes(family: Family) -> None:
    import importlib

    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    config = AutoConfig.for_model(family.model_type)
    model = (AutoModelForImageTextToText if family.tower else AutoModelForCausalLM)._model_mapping[type(config)]
    assert model.__name__ == family.causal_lm
    module = importlib.import_module(model.__module__)
    used = [family.norm, *[family.mlp] * family.covers("fused"), *[family.rotary] * family.covers("exact")]
    assert all(hasattr(module, name) for name in used)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.model_type)
def test_the_layers_are_the_models(family: Family) -> None:
    """Norms, the linears that read them, and the merged and split linears, in a model of one block."""
    import torch
    from transformers import AutoConfig

    from jetrl_patch.trainer.preflight import _on_meta

    sizes: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": None}
    sizes |= {"num_hidden_layers": 1, "vocab_size": 8, "intermediate_size": 64}
    if family.delta_net:
        sizes |= {"num_hidden_layers": 2, "full_attention_interval": 2}
    whole = AutoConfig.for_model(family.model_type, **({"text_config": sizes} if family.tower else sizes))
    config, blocks = whole.get_text_config(), _on_meta(whole).get_submodule(f"{family.decoder}.layers")
    modules = {name: module for block in blocks for name, module in block.named_modules()}
    if family.absorbed:  # whose queries are compressed, or not
        plain = _on_meta(AutoConfig.for_model(family.model_type, **sizes, q_lora_rank=None))
        modules |= dict(plain.get_submodule(f"{family.decoder}.layers.0").named_modules())
        assert type(modules["self_attn"]).__name__ == family.attention
        assert f"self_attn.{family.absorbed}" in modules
    linears = {name for name, module in modules.items() if isinstance(module, torch.nn.Linear)}
    readers = {reader for found in family.readers.values() for reader in found}
    assert all(type(modules[norm]).__name__ == family.norm for norm in family.readers)
    # a norm before experts has readers other than the shared experts
    beside = {name for name in linears if family.mixture and name.startswith("mlp.")} - set(family.row_parallel)
    assert family.delta_net == ("linear_attn" in modules)
    assert readers | beside | set(family.row_parallel) == linears
    assert not readers & set(family.row_parallel)
    leaves = [name.rpartition(".")[2] for name in linears]
    assert all(set(group) <= set(leaves) for group in family.merged)
    for layer, size in family.row_parallel.items():
        assert modules[layer].in_features == width(size, config), layer
    split = family.split_layers(config)
    assert set(split) == {
        f"{family.decoder}.layers.{index}.{layer}"
        for index, block in enumerate(blocks)
        for layer in family.row_parallel
        if layer in dict(block.named_modules())
    }


@pytest.mark.pins
def check_merged(towers: bool) -> None:
    """Assert that vLLM's models with or without a vision tower merge what their records say."""
    from vllm.model_executor.models.registry import ModelRegistry

    for family in covering("exact").values():
        if bool(family.tower) != towers:
            continue
        model = ModelRegistry._try_load_model_cls(family.causal_lm)
        assert model is not None, family.causal_lm
        by_transformers = model.__module__.startswith("vllm.model_executor.models.transformers")
        assert by_transformers == (family.rollout == "transformers") or family.rollout == "both"
        if not by_transformers:
            merged = {tuple(parts) for parts in model.packed_modules_mapping.values() if len(parts) > 1}
            if "mlp.shared_expert.down_proj" in family.row_parallel:  # vLLM enters it as it builds such a model
                merged.add(("gate_proj", "up_proj"))
            if family.absorbed:  # likewise
                merged.add(("q_a_proj", "kv_a_proj_with_mqa"))
            assert merged == set(family.merged), family.model_type


def test_one_vllm_model_merges_what_the_record_says() -> None:
    pytest.importorskip("vllm")
    check_merged(towers=False)


@needs_images
def test_vllm_models_with_a_tower_merge_what_the_record_says() -> None:
    code = "from tests.test_families import check_merged; check_merged(towers=True)"
    run = subprocess.run([sys.executable, "-c", code], env={**os.environ, **environ()}, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]


def test_unions_and_lists() -> None:
    assert MERGED[:2] == (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
    assert MERGED[2:] == (
        ("q_a_proj", "kv_a_proj_with_mqa"), ("in_proj_qkv", "in_proj_z"), ("in_proj_b", "in_proj_a")
    )  # fmt: skip
    assert {"kv_b_proj"} == ABSORBED
    assert {"o_proj", "down_proj", "out_proj"} == ROW_PARALLEL
    assert not any(LLAMA_LIKE.covers(part) for part in ("exact", "scaling", "fused", "megatron", "veomni"))
    assert titles(covering("megatron").values()) == "Qwen2/2.5, Qwen3, Llama, Qwen3-MoE, GLM-4-MoE and DeepSeek-V3"
    assert titles(covering("veomni").values()) == "Qwen2/2.5, Qwen3, Llama, Qwen3-MoE, Qwen3-VL and Qwen3-VL-MoE"
    assert titles([FAMILIES["phi3"]]) == "Phi-3/4"


def test_a_language_model_is_of_the_family_of_the_whole() -> None:
    for whole in FAMILIES:
        for name in (whole, f"{whole}_text"):
            assert family_of(SimpleNamespace(model_type=name)) is FAMILIES[whole]
    assert family_of(SimpleNamespace(model_type="bert_text")) is family_of(SimpleNamespace()) is None


def test_a_family_in_the_table_that_is_not_exact_says_why() -> None:
    with pytest.raises(ModelError, match=r"qwen2, qwen3, llama.*found model_type='glm4v' \(its vision tower.*align=\"linear\""):
        check_family(SimpleNamespace(model_type="glm4v"))


OUTSIDE = [
    ("qwen2", "use_sliding_window", True, "expected False"),
    ("qwen2", "layer_types", ["full_attention", "sliding_attention"], "whole context"),
    ("qwen3", "attention_bias", True, "o_proj"),
    ("llama", "hidden_act", "gelu", "SiLU"),
    ("qwen2", "dual_chunk_attention_config", {}, "whole context"),
    ("mistral", "sliding_window", 4096, "whole context"),
    ("mistral", "attention_bias", True, "no such bias"),
    ("phi3", "sliding_window", 2047, "whole context"),
    ("phi3", "resid_pdrop", 0.1, "no dropout"),
    ("seed_oss", "attention_bias", False, "always has a bias"),
    ("seed_oss", "attention_out_bias", True, "o_proj"),
    ("smollm3", "use_sliding_window", True, "whole context"),
    ("granite", "layer_types", ["full_attention"], "Leave it out of config.json, or use"),
    ("granite", "logit_scale", 0.5, "only vLLM"),
    ("olmoe", "clip_qkv", 8.0, "does not clip"),
    ("olmoe", "norm_topk_prob", True, "add up to 1"),
    ("olmoe", "rms_norm_eps", 1e-6, "in its code"),
    ("olmoe", "attention_bias", True, "biases of attention"),
    ("olmoe", "tie_word_embeddings", True, "of its own"),
    ("qwen2_moe", "qkv_bias", False, "always has a bias"),
    ("mixtral", "sliding_window", 4096, "whole context"),
    ("mixtral", "router_jitter_noise", 0.1, "Set router_jitter_noise=0 in config.json, or use"),
    ("glm4_moe", "tie_word_embeddings", True, "of its own"),
]


@pytest.mark.parametrize("family", ["mistral", "phi3", "mixtral", "llama", "granite"])
@pytest.mark.parametrize("factor", [None, 4.0])
def test_a_window_that_no_context_reaches_cannot_act(family: str, factor: float | None) -> None:
    config = config_of(family, max_position_embeddings=512)
    if factor:
        yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": factor, "original_max_position_embeddings": 512}
        config.rope_parameters = yarn
    for window, accepted in ((512, factor is None), (2047, factor is None), (2048, True), (16, False)):
        config.sliding_window = window
        if accepted:
            check_family(config)
            continue
        with pytest.raises(ModelError, match=f"sliding_window={window} .*(Set it to null|Remove it)"):
            check_family(config)


@pytest.mark.parametrize(("family", "key", "value", "says"), OUTSIDE)
def test_a_setting_that_is_not_covered_is_refused_by_name(family: str, key: str, value: Any, says: str) -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model(family)
    if hasattr(config, "sliding_window"):
        config.sliding_window = None
    assert check_family(config) is FAMILIES[family]
    setattr(config, key, value)
    with pytest.raises(ModelError, match=rf"this {family} model: {key}=.*{re.escape(says)}.*align=\"linear\""):
        check_family(config)
