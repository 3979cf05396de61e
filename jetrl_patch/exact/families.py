"""The model families for which both sides are known to agree, and what of their configuration is covered."""

from __future__ import annotations

from typing import Any

from jetrl_patch.errors import ModelError
from jetrl_patch.exact.rope import rope_parameters

#: ``model_type`` of a Hugging Face config -> its causal language model
SUPPORTED_FAMILIES = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "llama": "LlamaForCausalLM",
}
_ROPE_TYPES = ("default", "llama3", "linear")
_WAY_OUT = 'use align="linear" (shared FP8 linears, a small mismatch), or precision="bf16"'


def check_family(hf_config: Any) -> None:
    """Can equality be kept for this model?

    Raises:
        ModelError: for another family, or a setting of a supported one that is not covered; says which, and
            the way out.
    """
    family = getattr(hf_config, "model_type", None)
    if family not in SUPPORTED_FAMILIES:
        raise ModelError(
            f'align="exact" covers the model families {", ".join(SUPPORTED_FAMILIES)}, found model_type={family!r}; {_WAY_OUT}'
        )
    problems = []
    architectures = getattr(hf_config, "architectures", None) or [SUPPORTED_FAMILIES[family]]
    if SUPPORTED_FAMILIES[family] not in architectures:
        problems.append(f"architectures={architectures} (expected {SUPPORTED_FAMILIES[family]})")
    activation = getattr(hf_config, "hidden_act", "silu")
    if activation not in ("silu", "swish"):
        problems.append(f"hidden_act={activation!r} (expected 'silu')")
    if getattr(hf_config, "attention_dropout", 0):
        problems.append(f"attention_dropout={hf_config.attention_dropout} (expected 0)")
    if "sliding_attention" in (getattr(hf_config, "layer_types", None) or ()) or (
        getattr(hf_config, "use_sliding_window", False) and getattr(hf_config, "sliding_window", None)
    ):
        problems.append("sliding-window attention")
    rope = rope_parameters(hf_config)
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        problems.append(f"partial_rotary_factor={rope['partial_rotary_factor']} (expected 1)")
    if rope["rope_type"] not in _ROPE_TYPES:
        problems.append(f"rope type {rope['rope_type']!r} (expected one of {', '.join(_ROPE_TYPES)})")
    if getattr(hf_config, "quantization_config", None):
        problems.append("a quantization_config in the checkpoint (expected BF16 weights)")
    if problems:
        raise ModelError(f'align="exact" does not cover this {family} model: {"; ".join(problems)}; {_WAY_OUT}')
