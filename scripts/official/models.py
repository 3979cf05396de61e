"""The models that the frameworks' scripts name, with the keys of their ``config.json`` that a check reads.

A script names a model by its hub id or by a path that ends in the hub's name. Nothing is downloaded: ``write_all`` writes a
``config.json`` for each. Models that no mode covers have only their type and class.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal

__all__ = ["CLASSES", "MODELS", "Kind", "Model", "folder", "known", "write_all"]

Kind = Literal["dense", "MoE", "VL"]
#: the classes of models, in the order of the page
CLASSES: tuple[Kind, ...] = ("dense", "MoE", "VL")


@dataclass(frozen=True)
class Model:
    """One model: its class, and the keys of its ``config.json``."""

    kind: Kind
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def family(self) -> str:
        return str(self.config["model_type"])


def _dense(model_type: str, architecture: str, *shape: int, **more: Any) -> Model:
    """``shape``: hidden size, intermediate size, layers, heads, key-value heads, vocabulary."""
    hidden, inner, layers, heads, kv, vocabulary = shape
    config = {
        "model_type": model_type, "architectures": [architecture], "hidden_size": hidden, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv, "vocab_size": vocabulary,
    }  # fmt: skip
    return Model("dense", {**config, **more})


def _qwen2(*shape: int, **more: Any) -> Model:
    return _dense("qwen2", "Qwen2ForCausalLM", *shape, use_sliding_window=False, **more)


def _qwen3(*shape: int, **more: Any) -> Model:
    return _dense("qwen3", "Qwen3ForCausalLM", *shape, 151936, head_dim=128, **more)


def _other(kind: Kind, model_type: str, architecture: str, **more: Any) -> Model:
    return Model(kind, {"model_type": model_type, "architectures": [architecture], **more})


def _vision(model_type: str, architecture: str, tower: Mapping[str, Any], *shape: int, **more: Any) -> Model:
    """A language model with a vision tower; ``shape`` as in ``_dense``."""
    text = _dense(f"{model_type}_text", architecture, *shape, **more).config
    return _other("VL", model_type, architecture, text_config={**text, "architectures": None}, vision_config=tower)


def _qwen3_moe(hidden: int, inner: int, expert: int, layers: int, heads: int) -> Model:
    return _other(
        "MoE", "qwen3_moe", "Qwen3MoeForCausalLM", hidden_size=hidden, intermediate_size=inner, moe_intermediate_size=expert,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=4, head_dim=128, num_experts=128,
        num_experts_per_tok=8,
    )  # fmt: skip


_QWEN3_VL_ROPE = {
    "rope_theta": 5000000.0, "rope_scaling": {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True},
}  # fmt: skip


def _qwen3_vl_moe(hidden: int, inner: int, expert: int, layers: int, heads: int) -> Model:
    return _vision(
        "qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", {"out_hidden_size": hidden},
        hidden, inner, layers, heads, 4, 151936, head_dim=128, moe_intermediate_size=expert, num_experts=128,
        num_experts_per_tok=8, norm_topk_prob=True, **_QWEN3_VL_ROPE,
    )  # fmt: skip


def _deepseek_v3(**more: Any) -> Model:
    """Sizes default to DeepSeek-V3's, which are transformers' defaults."""
    routes = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    return _other("MoE", "deepseek_v3", "DeepseekV3ForCausalLM", **routes, **more)


_QWEN2_5_7B = _qwen2(3584, 18944, 28, 28, 4, 152064)
_QWEN2_5_32B = _qwen2(5120, 27648, 64, 40, 8, 152064)
_QWEN3_4B = _qwen3(2560, 9728, 36, 32, 8, tie_word_embeddings=True)
_QWEN3_30B = _qwen3_moe(2048, 6144, 768, 48, 32)
_QWEN3_235B = _qwen3_moe(4096, 12288, 1536, 94, 64)
_QWEN3_5_TEXT = {
    "attn_output_gate": True,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
}  # fmt: skip
_QWEN3_5 = _other("VL", "qwen3_5", "Qwen3_5ForConditionalGeneration", text_config=_QWEN3_5_TEXT)
_QWEN3_5_MOE = _other("VL", "qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", text_config=_QWEN3_5_TEXT)
_LLAMA_3_8B = _dense("llama", "LlamaForCausalLM", 4096, 14336, 32, 32, 8, 128256, rope_theta=500000.0)

#: the last part of a hub id -> record
MODELS: dict[str, Model] = {
    "Qwen2.5-0.5B-Instruct": _qwen2(896, 4864, 24, 14, 2, 151936, tie_word_embeddings=True),
    "Qwen2.5-7B": _QWEN2_5_7B,
    "Qwen2.5-7B-Instruct": _QWEN2_5_7B,
    "Qwen2.5-Math-7B": _QWEN2_5_7B,
    "Qwen2.5-32B": _QWEN2_5_32B,
    "Qwen2.5-32B-Instruct": _QWEN2_5_32B,
    "Qwen2.5-72B-Instruct": _qwen2(8192, 29568, 80, 64, 8, 152064),
    "DeepSeek-R1-Distill-Qwen-1.5B": _qwen2(1536, 8960, 28, 12, 2, 151936),
    "Qwen3-0.6B": _qwen3(1024, 3072, 28, 16, 8, tie_word_embeddings=True),
    "Qwen3-1.7B": _qwen3(2048, 6144, 28, 16, 8, tie_word_embeddings=True),
    "Qwen3-4B": _QWEN3_4B,
    "Qwen3-4B-Thinking-2507": _QWEN3_4B,
    "Qwen3-8B": _qwen3(4096, 12288, 36, 32, 8),
    "Qwen3-32B": _qwen3(5120, 25600, 64, 64, 8),
    "Llama-3-8b-sft-mixture": _LLAMA_3_8B,
    "Mistral-Nemo-Instruct-2407": _dense(
        "mistral", "MistralForCausalLM", 5120, 14336, 40, 32, 8, 131072, head_dim=128, sliding_window=None
    ),
    "Seed-OSS-36B-Base": _dense(
        "seed_oss", "SeedOssForCausalLM", 5120, 27648, 64, 80, 8, 155136, head_dim=128, attention_bias=True,
        attention_out_bias=False, mlp_bias=False, attention_dropout=0.1, residual_dropout=0.1,
    ),
    "MiMo-7B-RL": _dense("mimo", "MiMoForCausalLM", 4096, 11008, 36, 32, 8, 151680, num_nextn_predict_layers=1),
    "Qwen3-30B-A3B": _QWEN3_30B,
    "Qwen3-30B-A3B-Base": _QWEN3_30B,
    "Qwen3-30B-MoE-merge": _QWEN3_30B,
    "Qwen3-30B-A3B-Instruct-2507": _QWEN3_30B,
    "Qwen3-235B-A22B": _QWEN3_235B,
    "Qwen3-235B-A22B-Instruct-2507": _QWEN3_235B,
    "Qwen3-Next-80B-A3B-Instruct": _other("MoE", "qwen3_next", "Qwen3NextForCausalLM"),
    "gpt-oss-20b-bf16": _other("MoE", "gpt_oss", "GptOssForCausalLM"),
    "DeepSeek-V3": _deepseek_v3(),
    "DeepSeek-V4-Flash": _other("MoE", "deepseek_v4", "DeepseekV4ForCausalLM"),
    "Moonlight-16B-A3B": _deepseek_v3(
        hidden_size=2048, intermediate_size=11264, moe_intermediate_size=1408, num_hidden_layers=27, num_attention_heads=16,
        num_key_value_heads=16, n_routed_experts=64, num_experts_per_tok=6, n_shared_experts=2, first_k_dense_replace=1,
        n_group=1, topk_group=1, q_lora_rank=None, rms_norm_eps=1e-5, vocab_size=163840,
    ),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": _other("MoE", "nemotron_h", "NemotronHForCausalLM"),
    "Hy3": _other("MoE", "hy_v3", "HYV3ForCausalLM"),
    "GLM-5.1": _other("MoE", "glm_moe_dsa", "GlmMoeDsaForCausalLM"),
    "Kimi-K2.6": _other("VL", "kimi_k25", "KimiK25ForConditionalGeneration"),
    "Qwen2.5-VL-7B-Instruct": _vision(
        "qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration",
        {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 3584},
        3584, 18944, 28, 28, 4, 152064, use_sliding_window=False,
        rope_scaling={"type": "mrope", "mrope_section": [16, 24, 24]},
    ),
    "Qwen3-VL-8B-Instruct": _vision(
        "qwen3_vl", "Qwen3VLForConditionalGeneration", {"out_hidden_size": 4096}, 4096, 12288, 36, 32, 8, 151936, head_dim=128,
        **_QWEN3_VL_ROPE,
    ),
    "Qwen3-VL-30B-A3B-Instruct": _qwen3_vl_moe(2048, 6144, 768, 48, 32),
    "Qwen3-VL-235B-A22B-Instruct": _qwen3_vl_moe(4096, 12288, 1536, 94, 64),
    "Qwen3.5-2B": _QWEN3_5,
    "Qwen3.5-4B": _QWEN3_5,
    "Qwen3.5-27B": _QWEN3_5,
    "Qwen3.5-35B-A3B": _QWEN3_5_MOE,
    "Qwen3.5-122B-A10B": _QWEN3_5_MOE,
    "Qwen3.5-397B-A17B": _QWEN3_5_MOE,
    "GLM-4.1V-9B-Thinking": _vision(
        "glm4v", "Glm4vForConditionalGeneration", {}, 4096, 13696, 40, 32, 2, 151552, attention_bias=True,
        partial_rotary_factor=0.5, rope_scaling={"type": "default", "mrope_section": [8, 12, 12]},
    ),
    "MiniCPM-o-2_6": _other("VL", "minicpmo", "MiniCPMO"),
}  # fmt: skip


def known(path: str) -> str:
    """The key of ``MODELS`` that a hub id or a path names; empty if it is unknown."""
    name = PurePosixPath(path).name
    return name if name in MODELS else ""


def folder(name: str, place: Path) -> Path:
    """The folder of a model's ``config.json`` below ``place``, as written by ``write_all``."""
    return place / name


def write_all(place: Path) -> None:
    """Write every model's ``config.json`` before processes share the folder."""
    for name, model in MODELS.items():
        folder(name, place).mkdir(parents=True)
        (folder(name, place) / "config.json").write_text(json.dumps({"dtype": "bfloat16", **model.config}))
