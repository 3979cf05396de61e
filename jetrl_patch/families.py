"""The table of model families: one record for each ``model_type`` of a Hugging Face config.

A family built like Llama needs one short record, whose fields say where it differs. Code that depends on the family asks
the record, so no other file names a family. This module imports neither torch nor a framework.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = [
    "DENSE_BLOCKS",
    "FAMILIES",
    "LLAMA_LIKE",
    "MERGED",
    "ROW_PARALLEL",
    "TOWERS",
    "Family",
    "Part",
    "Setting",
    "covering",
    "titles",
]

#: what a family can be covered for: bit-equal outputs; folding scales into norms; norms and MLPs fused with the quantizer;
#: Megatron
Part = Literal["exact", "scaling", "fused", "megatron"]


@dataclass(frozen=True)
class Setting:
    """A key of ``config.json`` whose value decides whether trainer and rollout are bit-equal.

    Attributes:
        covered: the values for which they are; every item of a list must be one of them.
        reason: why other values are not covered.
        fix: what to do about another value; empty where only another mode helps.
    """

    key: str
    covered: tuple[Any, ...]
    reason: str
    fix: str = ""

    def problem(self, hf_config: Any) -> str:
        """What is wrong with this key of the configuration, as a phrase; empty if it is covered or missing."""
        if not hasattr(hf_config, self.key):
            return ""
        value = getattr(hf_config, self.key)
        items = value if isinstance(value, (list, tuple)) else [value]
        if all(item in self.covered for item in items):
            return ""
        expected = " or ".join(repr(item) for item in self.covered)
        return f"{self.key}={value!r} (expected {expected}: {self.reason})"


_WINDOW = "the shared attention sees the whole context"
_DENSE = "vLLM does not say which layers it merges in a dense block"
#: keys of config.json by which some blocks of a mixture have no experts -> values by which all have
DENSE_BLOCKS: dict[str, tuple[Any, ...]] = {"decoder_sparse_step": (1,), "mlp_only_layers": (None,)}
_NO_BIAS = "the model in transformers has no such bias"
#: for every family built like Llama
_SETTINGS = (
    Setting("hidden_act", ("silu", "swish"), "the shared activation is SiLU"),
    Setting("attention_dropout", (0,), "the rollout has no dropout", "set attention_dropout=0 in config.json"),
    Setting("use_sliding_window", (False, None), _WINDOW),
    Setting("layer_types", ("full_attention", None), _WINDOW),
    Setting("dual_chunk_attention_config", (None,), _WINDOW),
    Setting("quantization_config", (None, {}), "the run quantizes BF16 weights itself", "use the BF16 checkpoint"),
)
_READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}
_MERGED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_NOT_MEGATRON: dict[Part, str] = {"megatron": "its Megatron layers have not been compared with the rollout's"}
#: for every family with a vision tower
_SEEING: dict[Part, str] = {
    "exact": "its vision tower and its rotary angles of three dimensions have no ops that both sides share",
    "scaling": "moving factors has not been tested beside a vision tower",
    **_NOT_MEGATRON,
}


@dataclass(frozen=True)
class Family:
    """One model family. The defaults fit a model built like Llama.

    Attributes:
        model_type: ``model_type`` of the Hugging Face config.
        prefix: prefix of the family's class names in transformers.
        title: the family's name in messages and docs.
        readers: norm of a block -> the linears that are its only readers. The norm computes ``w * (x / rms(x))``.
        merged: groups of linears that vLLM merges into one layer, in its order.
        row_parallel: linears that tensor parallelism splits along K -> the size of K: "attention" (number of heads times
            head width) or a key of the configuration.
        uncovered: part that the family is not covered for -> reason.
        settings: keys of the configuration that decide whether exact mode is bit-equal.
        rollout: the model code that vLLM runs: its own, or that of transformers with vLLM's layers in it.
        logits_divisor: key of the number by which the trainer divides the logits.
        mixture: whether its blocks have experts, which transformers keeps in two parameters of one module, behind a router
            that takes the largest of a softmax.
        text: what the class names of a language model beside a tower have after the prefix.
        tower: the module that sees images and videos, up to the language model's embeddings; empty if there is none. Its
            layers stay in BF16 on both sides.
    """

    model_type: str
    prefix: str
    title: str
    readers: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: _READERS)
    merged: tuple[tuple[str, ...], ...] = _MERGED
    row_parallel: Mapping[str, str] = field(
        default_factory=lambda: {"self_attn.o_proj": "attention", "mlp.down_proj": "intermediate_size"}
    )
    uncovered: Mapping[Part, str] = field(default_factory=dict)
    settings: tuple[Setting, ...] = _SETTINGS
    rollout: Literal["vllm", "transformers"] = "vllm"
    logits_divisor: str | None = None
    mixture: bool = False
    text: str = ""
    tower: str = ""

    @property
    def causal_lm(self) -> str:
        return f"{self.prefix}For{'ConditionalGeneration' if self.tower else 'CausalLM'}"

    @property
    def decoder(self) -> str:
        """The module in transformers that holds the blocks of the language model."""
        return "model.language_model" if self.tower else "model"

    @property
    def norm(self) -> str:
        return f"{self.prefix}{self.text}RMSNorm"

    @property
    def mlp(self) -> str:
        return f"{self.prefix}{self.text}MLP"

    @property
    def rotary(self) -> str:
        return f"{self.prefix}{self.text}RotaryEmbedding"

    @property
    def experts(self) -> str:
        return f"{self.prefix}Experts"

    @property
    def router(self) -> str:
        return f"{self.prefix}TopKRouter"

    def covers(self, part: Part) -> bool:
        return part not in self.uncovered


#: stand-in for a family without a record, where only the layout of its layers matters
LLAMA_LIKE = Family("", "", "", uncovered=dict.fromkeys(("exact", "scaling", "fused", "megatron"), "it has no record"))

_RECORDS = (
    Family("qwen2", "Qwen2", "Qwen2/2.5"),
    Family(
        "qwen3",
        "Qwen3",
        "Qwen3",
        settings=(*_SETTINGS, Setting("attention_bias", (False,), "vLLM leaves out the bias of o_proj")),
    ),
    Family("llama", "Llama", "Llama"),
    Family(
        "mistral",
        "Mistral",
        "Mistral",
        uncovered=_NOT_MEGATRON,
        settings=(
            *_SETTINGS,
            Setting("sliding_window", (None,), _WINDOW),
            *(Setting(key, (False,), _NO_BIAS) for key in ("attention_bias", "bias", "mlp_bias")),
            Setting("llama_4_scaling", (None,), "the trainer does not scale queries"),
        ),
    ),
    Family(
        "phi3",
        "Phi3",
        "Phi-3",
        readers={"input_layernorm": ("self_attn.qkv_proj",), "post_attention_layernorm": ("mlp.gate_up_proj",)},
        merged=(),
        uncovered={
            "exact": "its q, k and v share one weight, and so do gate and up; the shared ops do not split them",
            "fused": "its gate and up share one weight, which the fused MLP does not split",
            **_NOT_MEGATRON,
        },
    ),
    Family(
        "seed_oss",
        "SeedOss",
        "Seed-OSS",
        uncovered={"fused": "its MLP can have dropout, which the fused MLP does not apply", **_NOT_MEGATRON},
        settings=(
            *_SETTINGS,
            Setting("residual_dropout", (0,), "the rollout has no dropout", "set residual_dropout=0 in config.json"),
            Setting("attention_bias", (True,), "vLLM always has a bias in q, k and v"),
            Setting("attention_out_bias", (False,), "vLLM leaves out the bias of o_proj"),
            Setting("mlp_bias", (False,), "vLLM leaves out the biases of the MLP"),
            Setting("is_causal", (True,), "the shared attention is causal"),
        ),
    ),
    Family("smollm3", "SmolLM3", "SmolLM3", uncovered=_NOT_MEGATRON, rollout="transformers"),
    Family(
        "granite",
        "Granite",
        "Granite",
        uncovered=_NOT_MEGATRON,
        settings=(
            *_SETTINGS,
            Setting("layer_types", (None,), "vLLM reads it as a sign of attention sinks", "leave it out of config.json"),
            Setting("attention_sinks", (False,), "the shared attention has no sinks"),
            Setting("layer_rope_theta", (None,), "all layers share one table of rotary angles"),
            Setting("logit_scale", (1,), "the trainer divides by logits_scaling alone"),
            Setting("bias", (False,), _NO_BIAS),
        ),
        logits_divisor="logits_scaling",
    ),
    Family(
        "qwen3_moe",
        "Qwen3Moe",
        "Qwen3-MoE",
        readers={"input_layernorm": _READERS["input_layernorm"]},
        merged=_MERGED[:1],
        row_parallel={"self_attn.o_proj": "attention"},
        uncovered={
            "scaling": "the readers of a norm before experts are not linear layers",
            "fused": "its experts quantize their tokens themselves",
            **_NOT_MEGATRON,
        },
        settings=(
            *_SETTINGS,
            Setting("attention_bias", (False,), "vLLM leaves out the bias of o_proj"),
            *(Setting(key, values, _DENSE) for key, values in DENSE_BLOCKS.items()),
        ),
        mixture=True,
    ),
    Family("qwen2_5_vl", "Qwen2_5_VL", "Qwen2.5-VL", uncovered=_SEEING, tower="visual"),
    Family("qwen3_vl", "Qwen3VL", "Qwen3-VL", uncovered=_SEEING, text="Text", tower="visual"),
)
FAMILIES: dict[str, Family] = {family.model_type: family for family in _RECORDS}

#: for all families: sibling layers that vLLM merges into one, in its order
MERGED = tuple(dict.fromkeys(group for family in (LLAMA_LIKE, *_RECORDS) for group in family.merged))
#: for all families: last name parts of the layers that a tensor-parallel rollout splits along K
ROW_PARALLEL = frozenset(name.rpartition(".")[2] for family in (LLAMA_LIKE, *_RECORDS) for name in family.row_parallel)
#: for all families: the parts of a layer's name that place it in a vision tower
TOWERS = frozenset(family.tower for family in _RECORDS) - {""}


def covering(part: Part) -> dict[str, Family]:
    """``model_type`` -> family, for the families covered for ``part``."""
    return {name: family for name, family in FAMILIES.items() if family.covers(part)}


def titles(families: Iterable[Family]) -> str:
    """The titles of at least one family, as a list in a sentence: "A, B and C"."""
    *most, last = (family.title for family in families)
    return f"{', '.join(most)} and {last}" if most else last
