"""One model family: what its record says.

This module imports neither torch nor a framework.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

#: what a family can be covered for: bit-equal outputs; folding scales into norms; norms and MLPs fused with the quantizer;
#: Megatron; VeOmni
Coverage = Literal["exact", "scaling", "fused", "megatron", "veomni"]
_ABSENT: Any = object()


@dataclass(frozen=True)
class ConfigKey:
    """A key of ``config.json`` that decides whether trainer and rollout are bit-equal, or compute the same function at all.

    Attributes:
        key: its name; a dot leads into an entry of it.
        covered: the values with which they are; empty for any. For a list, every item must be one of them.
        reason: why other values are not covered.
        fix: what to do about another value; empty if only another mode helps.
        everywhere: whether every mode with a quantized rollout refuses other values, because one side would compute something
            else, not just round differently.
        needed: whether a missing key is refused too, because one side has another default.
        is_window: whether a number is covered too that no context of the model reaches.
    """

    key: str
    covered: tuple[Any, ...]
    reason: str
    fix: str = ""
    everywhere: bool = False
    needed: bool = False
    is_window: bool = False

    @property
    def values(self) -> str:
        """The covered values, in words."""
        return " or ".join(map(repr, self.covered)) or "any value"

    def found(self, hf_config: Any) -> str:
        """The value that is not covered, as a phrase; empty if it is covered."""
        value = hf_config
        for part in self.key.split("."):
            value = value.get(part, _ABSENT) if isinstance(value, Mapping) else getattr(value, part, _ABSENT)
        if value is _ABSENT:
            return f"no {self.key}" if self.needed else ""
        if self.is_window and isinstance(value, int) and value >= _context(hf_config):
            return ""
        items = value if isinstance(value, (list, tuple)) else [value]
        return "" if not self.covered or all(item in self.covered for item in items) else f"{self.key}={value!r}"

    def problem(self, hf_config: Any) -> str:
        """What is wrong with this key, as a phrase; empty if it is covered."""
        found = self.found(hf_config)
        return found and f"{found} (expected {self.values}: {self.reason})"


def _context(hf_config: Any) -> float:
    """The longest context that vLLM serves with a model."""
    rope = getattr(hf_config, "rope_parameters", None) or {}
    return float(getattr(hf_config, "max_position_embeddings", None) or float("inf")) * max(float(rope.get("factor") or 1), 1.0)


WINDOW = "the shared attention sees the whole context"
ONLY_VLLM, REMOVE = "only vLLM reads it", "remove it from config.json"
#: numbers of a rotary embedding: transformers ignores all but the last three, which not every release of vLLM reads
_ROPE = (
    "use_fope", "rope_dim", "alpha", "max_trained_positions", "short_mscale", "long_mscale", "extrapolation_factor",
    "attn_factor", "mscale", "mscale_all_dim", "attention_factor",
)  # fmt: skip
#: for every family, unless its record has others
SETTINGS = (
    ConfigKey("hidden_act", ("silu",), "vLLM's models compute SiLU, and some know it by no other name", everywhere=True),
    ConfigKey("use_sliding_window", (False, None), WINDOW),
    ConfigKey("layer_types", ("full_attention", None), WINDOW),
    ConfigKey("head_dtype", (None, "model", "bfloat16"), ONLY_VLLM, REMOVE),
    ConfigKey("is_causal", (True,), ONLY_VLLM, REMOVE, everywhere=True),
    ConfigKey("rope_parameters.mrope_section", (None,), ONLY_VLLM, REMOVE, everywhere=True),
    ConfigKey("rope_parameters.full_attention", (None,), "all layers share one table of rotary angles", everywhere=True),
    ConfigKey("rope_parameters.apply_yarn_scaling", (True,), "the trainer always scales", everywhere=True),
    *(ConfigKey(f"rope_parameters.{key}", (None, False), "one side ignores it", REMOVE, everywhere=True) for key in _ROPE),
    ConfigKey("dual_chunk_attention_config", (None,), WINDOW),
    ConfigKey("rope_parameters.partial_rotary_factor", (1.0,), "the trainer always rotates whole heads", everywhere=True),
)
#: probabilities in the configuration that transformers' modules read. The rollout has no dropout
DROPOUTS = ("attention_dropout", "residual_dropout")
READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}
QKV, GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")


@dataclass(frozen=True)
class Mixture:
    """How the class names of a family's experts end; they start like those of its language model.

    Attributes:
        experts: the module that keeps a block's experts, in two parameters: its name in each supported transformers.
        router: the router.
        chooser: the block, if experts are chosen by the sigmoid of the router's FP32 logits, with a correction bias and groups.
            Before transformers 5.13 the block itself chooses, since then its router. Empty for the largest values of a softmax.
    """

    experts: tuple[str, ...] = ("Experts",)
    router: str = "TopKRouter"
    chooser: str = ""


@dataclass(frozen=True)
class Family:
    """One model family. The defaults fit blocks of plain attention and one gated MLP, whose linear layers are apart.

    Attributes:
        model_type: ``model_type`` of the Hugging Face config.
        prefix: prefix of the family's class names in transformers.
        title: the family's name in messages and docs.
        readers: norm of a block -> the linears that are its only readers. The norm computes ``w * (x / rms(x))``.
        merged: groups of linears that vLLM merges into one layer, in its order.
        row_parallel: linears that tensor parallelism splits along K -> the size of K: "attention", "latent attention" or
            "delta net" (number of heads times head width) or a key of the configuration; see ``width``.
        uncovered: part that the family is not covered for -> reason.
        settings: keys of the configuration that decide whether exact mode is bit-equal.
        rollout: the model code that vLLM runs: its own, or that of transformers with vLLM's layers in it; "both" if that depends
            on its release.
        logits_divisor: key of the number that the trainer divides the logits by.
        mixture: its experts and their router, if its blocks have any.
        stored: part of a tensor's name in a block of transformers' model -> the same part in a checkpoint and in vLLM, where
            they differ.
        transposed: whether checkpoints hold the matrices of experts transposed, which transformers tells from their shapes.
        text: what follows the prefix in the class names of a vision-language model's language part.
        tower: the module that sees images and videos, up to the language model's embeddings; empty if there is none. Its
            layers stay in BF16 on both sides.
        delta_net: whether some blocks have a gated delta net (``linear_attn``) instead of attention: a state that the tokens of
            a sequence update one after the other. ``layer_types`` of the configuration says which. The norms of such a model
            multiply by 1 + weight.
        plain_heads: whether vLLM's heads are hidden_size / num_attention_heads wide, whatever ``head_dim`` says.
        absorbed: of latent attention (MLA), the linear that makes keys and values from what they are compressed to; empty for
            other attention. In decoding, vLLM does not call this layer. It multiplies queries and outputs by the halves of its
            weight, in BF16, so the layer stays in BF16 on both sides.
    """

    model_type: str
    prefix: str
    title: str
    readers: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: READERS)
    merged: tuple[tuple[str, ...], ...] = (QKV, GATE_UP)
    row_parallel: Mapping[str, str] = field(
        default_factory=lambda: {"self_attn.o_proj": "attention", "mlp.down_proj": "intermediate_size"}
    )
    uncovered: Mapping[Coverage, str] = field(default_factory=dict)
    settings: tuple[ConfigKey, ...] = SETTINGS
    rollout: Literal["vllm", "transformers", "both"] = "vllm"
    logits_divisor: str | None = None
    mixture: Mixture | None = None
    stored: Mapping[str, str] = field(default_factory=dict)
    transposed: bool = False
    text: str = ""
    tower: str = ""
    delta_net: bool = False
    plain_heads: bool = False
    absorbed: str = ""

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
    def merges_gate(self) -> bool:
        """Whether transformers' MLP keeps gate and up in one weight."""
        return "mlp.gate_up_proj" in self.readers.get("post_attention_layernorm", ())

    @property
    def attention(self) -> str:
        return f"{self.prefix}{self.text}Attention"

    @property
    def rotary(self) -> str:
        """With delta nets and a tower, the only part of the language model whose name says so."""
        text = "Text" if self.delta_net and self.tower else self.text
        return f"{self.prefix}{text}RotaryEmbedding"

    @property
    def delta_rule(self) -> str:
        return f"{self.prefix}GatedDeltaNet"

    @property
    def gated_norm(self) -> str:
        """The norm of a delta net's output, the only one that multiplies by its weight alone."""
        return f"{self.prefix}RMSNormGated"

    @property
    def experts(self) -> tuple[str, ...]:
        return tuple(f"{self.prefix}{self.text}{name}" for name in self.mixture.experts) if self.mixture else ()

    @property
    def router(self) -> str:
        return f"{self.prefix}{self.text}{self.mixture.router}" if self.mixture else ""

    @property
    def chooser(self) -> str:
        return f"{self.prefix}{self.text}{self.mixture.chooser}" if self.mixture and self.mixture.chooser else ""

    def to_stored(self, name: str) -> str:
        """The name of a tensor or module in a checkpoint and in vLLM, from its name in transformers' model."""
        return _renamed(name, self.stored)

    def from_stored(self, name: str) -> str:
        """The reverse of ``to_stored``."""
        return _renamed(name, {theirs: ours for ours, theirs in self.stored.items()})

    def covers(self, part: Coverage) -> bool:
        return part not in self.uncovered

    def split_layers(self, hf_config: Any) -> dict[str, int]:
        """The layers of a language model that tensor parallelism splits along K, by their names, with K if it is known."""
        widths = {layer: k for layer, size in self.row_parallel.items() if (k := width(size, hf_config))}
        kinds = (getattr(hf_config, "layer_types", None) or []) if self.delta_net else []
        absent = {"linear_attention": "self_attn.", "full_attention": "linear_attn."}
        found: dict[str, int] = {}
        for index in range(getattr(hf_config, "num_hidden_layers", None) or 0):
            other = absent.get(kinds[index], "") if index < len(kinds) else ""
            own = {layer: k for layer, k in widths.items() if not other or not layer.startswith(other)}
            found.update((f"{self.decoder}.layers.{index}.{layer}", k) for layer, k in own.items())
        return found


def width(size: str, hf_config: Any) -> int:
    """The number behind a size of ``row_parallel``; 0 if the language model's configuration does not have it."""

    def value(key: str) -> int:
        found = getattr(hf_config, key, None)
        return found if isinstance(found, int) else 0

    if size == "delta net":
        return value("linear_num_value_heads") * value("linear_value_head_dim")
    if size == "latent attention":
        return value("num_attention_heads") * value("v_head_dim")
    if size == "attention":
        heads = value("num_attention_heads")
        return heads * (value("head_dim") or (value("hidden_size") // heads if heads else 0))
    return value(size)


def _renamed(name: str, parts: Mapping[str, str]) -> str:
    return ".".join(parts.get(part, part) for part in name.split("."))
