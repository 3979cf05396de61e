"""The table of model families: one record for each ``model_type`` of a Hugging Face config.

A family built like Llama needs one short record, whose fields say where it differs. Code that depends on the family asks the
record, and no other file names a family. This module imports neither torch nor a framework.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from jetrl_patch.models.family import (
    GATE_UP,
    ONLY_VLLM,
    QKV,
    READERS,
    REMOVE,
    SETTINGS,
    WINDOW,
    ConfigKey,
    Coverage,
    Family,
    Mixture,
)

__all__ = [
    "ABSORBED", "DENSE_BLOCKS", "FAMILIES", "LLAMA_LIKE", "MERGED", "ROW_PARALLEL", "TOWERS", "ConfigKey", "Coverage",
    "Family", "covering", "family_of", "titles",
]  # fmt: skip

_DENSE = "vLLM does not say which layers it merges in a dense block"
#: keys of config.json that can leave some blocks of a mixture without experts -> values with which all blocks have experts
DENSE_BLOCKS: dict[str, tuple[Any, ...]] = {"decoder_sparse_step": (1,), "mlp_only_layers": (None,)}
_ALL_BLOCKS = tuple(ConfigKey(key, values, _DENSE) for key, values in DENSE_BLOCKS.items())
#: one side ignores the key
_always = functools.partial(ConfigKey, everywhere=True)
_NO_OUTPUT_BIAS = _always("attention_bias", (False,), "vLLM leaves out the bias of o_proj")
_NO_BIAS = "the model in transformers has no such bias"
#: for the families that vLLM builds as a Llama
_NO_BIASES = tuple(_always(key, (False,), _NO_BIAS) for key in ("attention_bias", "bias", "mlp_bias", "qkv_bias"))
_NOT_VEOMNI: dict[Coverage, str] = {"veomni": "its VeOmni layers have not been compared with transformers'"}
_NOT_MEGATRON: dict[Coverage, str] = {"megatron": "its Megatron layers have not been compared with the rollout's"}
_ONLY_TRANSFORMERS: dict[Coverage, str] = {**_NOT_MEGATRON, **_NOT_VEOMNI}
_NO_WINDOW = ConfigKey(
    "sliding_window", (None,), WINDOW, "set it to null in config.json if no sequence of your run is longer than the window",
    is_window=True,
)  # fmt: skip


def _only_vllm(key: str, *values: Any, **more: Any) -> ConfigKey:
    """A key that vLLM's model of the family reads and transformers' ignores, with the values that change nothing."""
    return _always(key, values, ONLY_VLLM, REMOVE, **more)


_LOGIT_SCALE = _only_vllm("logit_scale", 1)
_NAMED_WINDOW = _only_vllm("sliding_window", None, 0, is_window=True)  # vLLM gives a window to every model that names one
_PARTIAL = ConfigKey("rope_parameters.partial_rotary_factor", (), "both sides leave part of a head unrotated")
_PHI_DROPOUTS = ("resid_pdrop", "embd_pdrop")
_NOT_TIED = ConfigKey("tie_word_embeddings", (False,), "vLLM gives lm_head a weight of its own")
_ONE_WEIGHT = "its gate and up share one weight, which the fused MLP does not split"
#: for every family with experts
_BEFORE_ATTENTION = {"input_layernorm": READERS["input_layernorm"]}
_OUTPUT = {"self_attn.o_proj": "attention"}
_IN_MEGATRON: dict[Coverage, str] = {
    "scaling": "the readers of a norm before experts are not linear layers",
    "fused": "its experts quantize their tokens themselves",
}
_EXPERTS = _IN_MEGATRON | _NOT_MEGATRON
#: for every family with a vision tower
_SECTIONS = ConfigKey(
    "rope_parameters.mrope_section", (), "without it vLLM's positions have one dimension, the trainer's three",
    "set it in config.json", everywhere=True, needed=True,
)  # fmt: skip
_INTERLEAVED = (
    ConfigKey("rope_parameters.mrope_interleaved", (True,), "the trainer's angles are interleaved", needed=True),
    _SECTIONS,
)
_TOWER: dict[Coverage, str] = {"scaling": "moving factors has not been tested with a vision tower", **_NOT_MEGATRON}
_VISION: dict[Coverage, str] = {
    "exact": "its vision tower and its rotary angles of three dimensions have no ops that both sides share",
    **_TOWER,
}

#: for every family with gated delta nets
_ONE_PLUS = "its norms multiply by 1 + weight"
_DELTA_NET: dict[Coverage, str] = {"scaling": _ONE_PLUS, "fused": _ONE_PLUS, **_ONLY_TRANSFORMERS}
_DELTA_SETTINGS = (
    _PARTIAL,
    ConfigKey("layer_types", ("full_attention", "linear_attention"), WINDOW),
    _always("attention_bias", (False,), "vLLM leaves out the biases of attention"),
    _always("qkv_bias", (False,), _NO_BIAS),
    _always("attn_output_gate", (True,), "the trainer always gates the output of attention"),
    _always("output_gate_type", ("silu", "swish"), "the trainer gates the output of a delta net by SiLU"),
    _always("layer_scale", (False,), "the trainer does not scale layers"),
)
#: for the family with latent attention
_NO_SUCH_NUMBER = "vLLM's YaRN of this family has no such number"
_LATENT = (
    _always("scoring_func", ("sigmoid",), "vLLM's default is a softmax", "set it in config.json", needed=True),
    _always("topk_method", ("noaux_tc",), "vLLM corrects no scores otherwise", "set it in config.json", needed=True),
    _always("moe_layer_freq", (1,), "in the trainer all blocks after the first dense ones have experts"),
    _always("attention_bias", (False,), "vLLM leaves out the biases of attention"),
    replace(_NOT_TIED, everywhere=True),
    _always("rope_interleave", (True,), "vLLM always rotates neighboring numbers of a head"),
    _always("rope_parameters.rope_type", ("default", "yarn"), "vLLM treats every other type as YaRN"),
    _always("rope_parameters.attention_factor", (None,), _NO_SUCH_NUMBER),
    _always("rope_parameters.truncate", (True,), _NO_SUCH_NUMBER),
    *(ConfigKey(f"rope_parameters.{key}", (), "both sides scale by it") for key in ("mscale", "mscale_all_dim")),
    _always("index_topk", (None,), "the trainer's attention is not sparse"),
    _always("llama_4_scaling", (None,), "the trainer does not scale queries"),
)
#: the linear layers that read a delta net's input, and those that vLLM merges
_IN = ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z", "linear_attn.in_proj_b", "linear_attn.in_proj_a")
_IN_MERGED = (("in_proj_qkv", "in_proj_z"), ("in_proj_b", "in_proj_a"))
_OUT = {"linear_attn.out_proj": "delta net"}

#: stand-in for a family without a record, where only the layout of its layers matters
LLAMA_LIKE = Family("", "", "", uncovered=dict.fromkeys(("exact", "scaling", "fused", "megatron", "veomni"), "it has no record"))


def _family(model_type: str, classes: str, title: str, *settings: ConfigKey, **fields: Any) -> Family:
    """A record with ``settings`` in addition to those of every family, or instead of those for the same keys."""
    own = {setting.key for setting in settings}
    common = (setting for setting in SETTINGS if setting.key not in own)
    return Family(model_type, classes, title, settings=(*common, *settings), **fields)


def _with_experts(model_type: str, classes: str, title: str, *settings: ConfigKey, **fields: Any) -> Family:
    common = {"readers": _BEFORE_ATTENTION, "row_parallel": _OUTPUT, "mixture": Mixture(), "uncovered": _EXPERTS | _NOT_VEOMNI}
    return _family(model_type, classes, title, *settings, **common | fields)


_RECORDS = (
    _family("qwen2", "Qwen2", "Qwen2/2.5", _only_vllm("qk_norm", False), plain_heads=True),
    _family("qwen3", "Qwen3", "Qwen3", _NO_OUTPUT_BIAS),
    _family(
        "llama", "Llama", "Llama",
        _NAMED_WINDOW,
        *(_only_vllm(key, False) for key in ("bias", "qkv_bias")),
        _LOGIT_SCALE,
    ),
    _family(
        "mistral", "Mistral", "Mistral",
        _NO_WINDOW,
        *_NO_BIASES,
        _LOGIT_SCALE,
        _always("llama_4_scaling", (None,), "the trainer does not scale queries"),
        _only_vllm("ada_rms_norm_t_cond", False),
        uncovered=_ONLY_TRANSFORMERS,
    ),
    _family(
        "phi3", "Phi3", "Phi-3/4",
        _NO_WINDOW,
        _PARTIAL,
        *(ConfigKey(key, (0,), "the rollout has no dropout", f"set {key}=0 in config.json") for key in _PHI_DROPOUTS),
        *_NO_BIASES,
        _LOGIT_SCALE,
        readers={"input_layernorm": ("self_attn.qkv_proj",), "post_attention_layernorm": ("mlp.gate_up_proj",)},
        merged=(),
        uncovered={"fused": _ONE_WEIGHT, **_ONLY_TRANSFORMERS},
    ),
    _family(
        "seed_oss", "SeedOss", "Seed-OSS",
        _NAMED_WINDOW,
        _always("attention_bias", (True,), "vLLM always has a bias in q, k and v"),
        _always("attention_out_bias", (False,), "vLLM leaves out the bias of o_proj"),
        _always("mlp_bias", (False,), "vLLM leaves out the biases of the MLP"),
        uncovered={"fused": "its MLP can have dropout, which the fused MLP does not apply", **_ONLY_TRANSFORMERS},
        rollout="both",  # transformers' code since vLLM 0.32
    ),
    Family("smollm3", "SmolLM3", "SmolLM3", uncovered=_ONLY_TRANSFORMERS, rollout="transformers"),
    _family(
        "granite", "Granite", "Granite",
        _NAMED_WINDOW,
        _always("layer_types", (None,), "vLLM reads it as a sign of attention sinks", "leave it out of config.json"),
        _always("attention_sinks", (False,), "the shared attention has no sinks"),
        _always("layer_rope_theta", (None,), "all layers share one table of rotary angles"),
        _LOGIT_SCALE,
        _only_vllm("bias", False),
        uncovered=_ONLY_TRANSFORMERS,
        logits_divisor="logits_scaling",
    ),
    _with_experts(
        "qwen3_moe", "Qwen3Moe", "Qwen3-MoE",
        _NO_OUTPUT_BIAS,
        *_ALL_BLOCKS,
        _only_vllm("shared_expert_intermediate_size", None, 0),
        merged=(QKV,),
        uncovered=_IN_MEGATRON,
    ),
    _with_experts(
        "olmoe", "Olmoe", "OLMoE",
        _NAMED_WINDOW,
        _always("attention_bias", (False,), "vLLM leaves out the biases of attention"),
        _always("clip_qkv", (None,), "vLLM does not clip q, k and v"),
        _always("norm_topk_prob", (False,), "vLLM never makes routing weights add up to 1"),
        _always("rms_norm_eps", (1e-5,), "vLLM has this number in its code"),
        _NOT_TIED,
        merged=(QKV,),
        plain_heads=True,
    ),
    _with_experts(
        "qwen2_moe", "Qwen2Moe", "Qwen2-MoE",
        _always("qkv_bias", (True,), "vLLM always has a bias in q, k and v"),
        row_parallel={**_OUTPUT, "mlp.shared_expert.down_proj": "shared_expert_intermediate_size"},
        plain_heads=True,
    ),
    _with_experts(
        "mixtral", "Mixtral", "Mixtral",
        _NO_WINDOW,
        ConfigKey("router_jitter_noise", (0,), "the rollout has no noise", "set router_jitter_noise=0 in config.json"),
        merged=(QKV,),
        stored={"mlp": "block_sparse_moe", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"},
    ),
    _with_experts(
        "glm4_moe", "Glm4Moe", "GLM-4-MoE",
        _NAMED_WINDOW,
        _PARTIAL,
        _NOT_TIED,
        row_parallel={**_OUTPUT, "mlp.down_proj": "intermediate_size"},
        mixture=Mixture(("NaiveMoe", "Experts"), "TopkRouter", "MoE"),
        uncovered=_IN_MEGATRON | _NOT_VEOMNI,
    ),
    _with_experts(
        "deepseek_v3", "DeepseekV3", "DeepSeek-V3",
        _NAMED_WINDOW,
        *_LATENT,
        readers={
            "input_layernorm": ("self_attn.q_proj", "self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
            "self_attn.q_a_layernorm": ("self_attn.q_b_proj",),
            "self_attn.kv_a_layernorm": ("self_attn.kv_b_proj",),
        },
        merged=(("q_a_proj", "kv_a_proj_with_mqa"), GATE_UP),
        row_parallel={"self_attn.o_proj": "latent attention", "mlp.down_proj": "intermediate_size"},
        mixture=Mixture(("NaiveMoe", "Experts"), "TopkRouter", "MoE"),
        uncovered=_IN_MEGATRON | _NOT_VEOMNI,
        absorbed="kv_b_proj",
    ),
    _family(
        "qwen2_5_vl", "Qwen2_5_VL", "Qwen2.5-VL",
        _SECTIONS,
        uncovered=_TOWER | _NOT_VEOMNI,
        tower="visual",
        plain_heads=True,
    ),
    _family(
        "qwen3_vl", "Qwen3VL", "Qwen3-VL",
        _NO_OUTPUT_BIAS,
        *_INTERLEAVED,
        uncovered=_TOWER,
        text="Text",
        tower="visual",
    ),
    _family(
        "qwen3_5", "Qwen3_5", "Qwen3.5",
        *_DELTA_SETTINGS,
        *_INTERLEAVED,
        readers={**READERS, "input_layernorm": (*READERS["input_layernorm"], *_IN)},
        merged=(QKV, GATE_UP, *_IN_MERGED),
        row_parallel={**_OUTPUT, **_OUT, "mlp.down_proj": "intermediate_size"},
        uncovered=_DELTA_NET,
        tower="visual",
        delta_net=True,
    ),
    _with_experts(
        "qwen3_5_moe", "Qwen3_5Moe", "Qwen3.5-MoE",
        *_DELTA_SETTINGS,
        *_INTERLEAVED,
        _always("norm_topk_prob", (True,), "the trainer always makes routing weights add up to 1"),
        readers={"input_layernorm": (*READERS["input_layernorm"], *_IN)},
        merged=(QKV, GATE_UP, *_IN_MERGED),
        row_parallel={**_OUTPUT, **_OUT, "mlp.shared_expert.down_proj": "shared_expert_intermediate_size"},
        uncovered=_EXPERTS | _DELTA_NET,
        tower="visual",
        delta_net=True,
    ),
    _with_experts(
        "qwen3_next", "Qwen3Next", "Qwen3-Next",
        *_DELTA_SETTINGS,
        _NOT_TIED,
        readers={"input_layernorm": (*READERS["input_layernorm"], "linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba")},
        row_parallel={**_OUTPUT, **_OUT, "mlp.shared_expert.down_proj": "shared_expert_intermediate_size"},
        uncovered=_EXPERTS | _DELTA_NET,
        delta_net=True,
    ),
    _with_experts(
        "qwen3_vl_moe", "Qwen3VLMoe", "Qwen3-VL-MoE",
        _NO_OUTPUT_BIAS,
        *_INTERLEAVED,
        *_ALL_BLOCKS,
        merged=(QKV,),
        uncovered=_EXPERTS | _TOWER,
        transposed=True,
        text="Text",
        tower="visual",
    ),
    _family(
        "glm4v", "Glm4v", "GLM-4.1V",
        _PARTIAL,
        _SECTIONS,
        readers={**_BEFORE_ATTENTION, "post_attention_layernorm": ("mlp.gate_up_proj",)},
        merged=(QKV,),
        uncovered={**_VISION, **_NOT_VEOMNI, "fused": _ONE_WEIGHT},
        tower="visual",
    ),
)  # fmt: skip
FAMILIES: dict[str, Family] = {family.model_type: family for family in _RECORDS}

#: for all families: sibling layers that vLLM merges into one, in its order
MERGED = tuple(dict.fromkeys(group for family in (LLAMA_LIKE, *_RECORDS) for group in family.merged))
#: for all families: last name parts of the layers that a tensor-parallel rollout splits along K
ROW_PARALLEL = frozenset(name.rpartition(".")[2] for family in (LLAMA_LIKE, *_RECORDS) for name in family.row_parallel)
#: for all families: the parts of a layer's name that place it in a vision tower
TOWERS = frozenset(family.tower for family in _RECORDS) - {""}
#: for all families: last name parts of the layers whose weights the rollout's attention multiplies with itself
ABSORBED = frozenset(family.absorbed for family in _RECORDS) - {""}


def covering(part: Coverage) -> dict[str, Family]:
    """``model_type`` -> family, for the families covered for ``part``."""
    return {name: family for name, family in FAMILIES.items() if family.covers(part)}


def family_of(hf_config: Any) -> Family | None:
    """The family of a model, from its configuration or that of its language model. None without a record."""
    model_type = getattr(hf_config, "model_type", None) or ""
    return FAMILIES.get(model_type) or FAMILIES.get(model_type.removesuffix("_text"))


def record_of(hf_config: Any) -> Family:
    """The record of a model's family, or ``LLAMA_LIKE``."""
    return family_of(hf_config) or LLAMA_LIKE


def uncovered(hf_config: Any, part: Coverage) -> str:
    """The model type of a model that ``part`` does not cover, with the reason if its family's record has one."""
    family = family_of(hf_config)
    reason = family.uncovered.get(part) if family else None
    return f"model_type={getattr(hf_config, 'model_type', None)!r}" + (f" ({reason})" if reason else "")


def titles(families: Iterable[Family]) -> str:
    """The titles of at least one family, as a list in a sentence: "A, B and C"."""
    *most, last = (family.title for family in families)
    return f"{', '.join(most)} and {last}" if most else last
