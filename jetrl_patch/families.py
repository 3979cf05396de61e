"""What is known of each model family, once: a record a family, under the ``model_type`` of its Hugging Face config.

A new family that is built like Llama is one short record; a field says where it differs. Whatever depends on the family
asks the record, so no other file of the project names one. Imports neither torch nor a framework.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["FAMILIES", "LLAMA_LIKE", "MERGED", "ROW_PARALLEL", "Family", "Part", "Setting", "covering", "titles"]

#: what a family may be covered for: equal bits; taking factors out of a norm; norms and MLPs fused with the quantizer; Megatron
Part = Literal["exact", "scaling", "fused", "megatron"]


@dataclass(frozen=True)
class Setting:
    """A key of ``config.json`` whose value decides whether trainer and rollout agree to the last bit.

    Attributes:
        covered: the values for which they do; of a list, every item must be one of them.
        reason: why no other value is covered.
        fix: what to do about another value; empty where only another mode helps.
    """

    key: str
    covered: tuple[Any, ...]
    reason: str
    fix: str = ""

    def problem(self, hf_config: Any) -> str:
        """What is wrong with the configuration, empty if nothing is; a key that it lacks has no value to refuse."""
        if not hasattr(hf_config, self.key):
            return ""
        value = getattr(hf_config, self.key)
        items = value if isinstance(value, (list, tuple)) else [value]
        if all(item in self.covered for item in items):
            return ""
        expected = " or ".join(repr(item) for item in self.covered)
        return f"{self.key}={value!r} (expected {expected}: {self.reason})"


_WINDOW = "the shared attention sees the whole context"
_NO_BIAS = "transformers' model has no such bias"
#: what holds for every family that is built like Llama
_SETTINGS = (
    Setting("hidden_act", ("silu", "swish"), "the shared activation is SiLU"),
    Setting("attention_dropout", (0,), "the rollout drops nothing", "set attention_dropout=0 in config.json"),
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
_NOT_MEGATRON: dict[Part, str] = {"megatron": "its layers in Megatron were not compared with the rollout's"}


@dataclass(frozen=True)
class Family:
    """One family; the defaults are those of a model that is built like Llama.

    Attributes:
        model_type: of the Hugging Face config.
        prefix: what the names of its classes in transformers begin with.
        title: what people call it.
        readers: norm of a block -> the linears that read it, and nothing else does; its formula is ``w * (x / rms(x))``.
        merged: linears that vLLM holds as one, in its order.
        row_parallel: linears that tensor parallelism splits along K -> what K is, "attention" (heads times their width)
            or a key of the configuration.
        uncovered: what it is not covered for -> why, in words; it is covered for the rest.
        settings: what of the configuration decides about equality in exact mode.
        rollout: whose code of the model vLLM runs: its own, or that of transformers with its layers put in.
        logits_divisor: key of the number by which the trainer divides the logits.
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

    @property
    def causal_lm(self) -> str:
        return f"{self.prefix}ForCausalLM"

    @property
    def norm(self) -> str:
        return f"{self.prefix}RMSNorm"

    @property
    def mlp(self) -> str:
        return f"{self.prefix}MLP"

    @property
    def rotary(self) -> str:
        return f"{self.prefix}RotaryEmbedding"

    def covers(self, part: Part) -> bool:
        return part not in self.uncovered


#: stands for a family without a record, where only the layout of its layers is asked for
LLAMA_LIKE = Family("", "", "", uncovered=dict.fromkeys(("exact", "scaling", "fused", "megatron"), "it has no record"))

_RECORDS = (
    Family("qwen2", "Qwen2", "Qwen2/2.5"),
    Family(
        "qwen3",
        "Qwen3",
        "Qwen3",
        settings=(*_SETTINGS, Setting("attention_bias", (False,), "vLLM leaves the bias of o_proj out")),
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
            Setting("llama_4_scaling", (None,), "the trainer does not scale its queries"),
        ),
    ),
    Family(
        "phi3",
        "Phi3",
        "Phi-3",
        readers={"input_layernorm": ("self_attn.qkv_proj",), "post_attention_layernorm": ("mlp.gate_up_proj",)},
        merged=(),
        uncovered={
            "exact": "its q, k and v, and gate and up, are one weight each, which the shared ops do not take apart",
            "fused": "its gate and up are one weight, which the fused MLP does not take apart",
            **_NOT_MEGATRON,
        },
    ),
    Family(
        "seed_oss",
        "SeedOss",
        "Seed-OSS",
        uncovered={"fused": "its MLP may drop parts of its output, which the fused MLP does not", **_NOT_MEGATRON},
        settings=(
            *_SETTINGS,
            Setting("residual_dropout", (0,), "the rollout drops nothing", "set residual_dropout=0 in config.json"),
            Setting("attention_bias", (True,), "vLLM always has a bias of q, k and v"),
            Setting("attention_out_bias", (False,), "vLLM leaves the bias of o_proj out"),
            Setting("mlp_bias", (False,), "vLLM leaves the biases of the MLP out"),
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
            Setting("layer_types", (None,), "vLLM takes it for a sign of attention sinks", "leave it out of config.json"),
            Setting("attention_sinks", (False,), "the shared attention has no sinks"),
            Setting("layer_rope_theta", (None,), "both sides share one table of angles"),
            Setting("logit_scale", (1,), "the trainer divides by logits_scaling alone"),
            Setting("bias", (False,), _NO_BIAS),
        ),
        logits_divisor="logits_scaling",
    ),
)
FAMILIES: dict[str, Family] = {family.model_type: family for family in _RECORDS}

#: of all families: layers of one parent that vLLM holds as one, in its order
MERGED = tuple(dict.fromkeys(group for family in (LLAMA_LIKE, *_RECORDS) for group in family.merged))
#: of all families: last parts of the names of layers that a tensor-parallel rollout splits along K
ROW_PARALLEL = frozenset(name.rpartition(".")[2] for family in (LLAMA_LIKE, *_RECORDS) for name in family.row_parallel)


def covering(part: Part) -> dict[str, Family]:
    """The families that are covered for ``part``, by ``model_type``."""
    return {name: family for name, family in FAMILIES.items() if family.covers(part)}


def titles(families: Iterable[Family]) -> str:
    """Their names as people write them, as a list in a sentence."""
    *most, last = (family.title for family in families)
    return f"{', '.join(most)} and {last}" if most else last
