"""How a model is built: layers that share one precision, and structures that no mode handles. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from jetrl_patch.errors import UNQUANTIZED, ModelError, explain
from jetrl_patch.models.families import FAMILIES, family_of, record_of

if TYPE_CHECKING:
    from jetrl_patch.config import Config


# ---- Layers that share one precision: the experts of a block, which one operation computes -------
# Checkpoints, exclude patterns and the weight sync name an expert's matrices one by one:
# ``model.layers.3.mlp.experts.17.up_proj``. Code that counts, watches or moves layers treats the experts of a block as one unit,
# under their module's name: ``model.layers.3.mlp.experts``.

Projection = Literal["gate_proj", "up_proj", "down_proj"]
#: the matrices of an expert, as transformers names them
PROJECTIONS: tuple[Projection, ...] = ("gate_proj", "up_proj", "down_proj")
_MATRIX = re.compile(rf"(.*\.experts)\.(\d+)\.({'|'.join(PROJECTIONS)})")


def unit_of(layer: str) -> str:
    """The module of experts that a layer belongs to; for any other layer, its own name."""
    found = _MATRIX.fullmatch(layer)
    return found[1] if found else layer


def units(layers: Iterable[str]) -> dict[str, list[str]]:
    """The units of these layers in order, each with its layers."""
    found: dict[str, list[str]] = {}
    for layer in layers:
        found.setdefault(unit_of(layer), []).append(layer)
    return found


def matrices_of(unit: str, experts: int) -> list[str]:
    """The layers of a unit with this many experts."""
    return [f"{unit}.{expert}.{part}" for expert in range(experts) for part in PROJECTIONS]


def matrix_number(layer: str) -> int | None:
    """The position of an expert's matrix in its unit, expert by expert; None for any other layer."""
    found = _MATRIX.fullmatch(layer)
    return len(PROJECTIONS) * int(found[2]) + PROJECTIONS.index(found[3]) if found else None


def matrix_name(number: int) -> str:
    """The reverse of ``matrix_number``, without the unit: ``17.up_proj``."""
    expert, part = divmod(number, len(PROJECTIONS))
    return f"{expert}.{PROJECTIONS[part]}"


def matrix_expert(number: int) -> int:
    """The expert that the matrix of this number belongs to."""
    return number // len(PROJECTIONS)


# ---- Models that no quantizing mode handles because of how they are built, recognized by their config.json
# A driver refuses them before anything is loaded.

#: keys for the number of experts, in the order in which vLLM looks them up
EXPERTS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")
#: what a quantized rollout requires of a checkpoint
UNQUANTIZED_WEIGHTS = "BF16 weights, which the run quantizes itself"
#: keys of state-space blocks (Mamba): the number of their heads or channels
_STATE_SPACE = ("mamba_num_heads", "mamba_n_heads", "mamba_d_state", "ssm_state_size", "state_size")
#: the width to which latent attention (MLA) compresses keys and values
_LATENT = "kv_lora_rank"


def is_vision_language(hf_config: Any) -> bool:
    """Whether the record of the model's family names a vision tower."""
    family = FAMILIES.get(getattr(hf_config, "model_type", ""))
    return family is not None and bool(family.tower)


def placeholders(hf_config: Any) -> list[int]:
    """Return the placeholder tokens of images and videos; none for a model without a known vision tower."""
    ids = (getattr(hf_config, name, None) for name in ("image_token_id", "video_token_id") if is_vision_language(hf_config))
    return [int(token) for token in ids if token is not None]


def has_delta_nets(hf_config: Any) -> bool:
    """Whether some blocks have a gated delta net instead of attention."""
    return record_of(hf_config).delta_net


def key_heads(text_config: Any) -> int:
    """The key heads of a model's attention, each of which some query heads share."""
    return int(getattr(text_config, "num_key_value_heads", None) or text_config.num_attention_heads)


def has_latent_attention(hf_config: Any) -> bool:
    """Whether the record of the model's family has latent attention (MLA)."""
    return bool(record_of(hf_config).absorbed)


def expert_sizes(hf_config: Any) -> tuple[int, int] | None:
    """The number of experts of a block and their intermediate size, from the whole model's config; None if it has no mixture."""
    if not record_of(hf_config).mixture:
        return None
    text = text_config(hf_config)
    count = next((int(count) for name in EXPERTS if (count := getattr(text, name, None))), 0)
    return (count, int(getattr(text, "moe_intermediate_size", None) or text.intermediate_size)) if count else None


def text_config(hf_config: Any) -> Any:
    """The config of the language model. With a vision tower, its ``model_type`` is not a key of the families' table."""
    return hf_config.get_text_config() if is_vision_language(hf_config) else hf_config


def require_attention(hf_config: Any, what: str, fix: str) -> None:
    """Raise ModelError for a model with gated delta nets or latent attention. ``what`` and ``fix`` are those of ``explain``."""
    required = ""
    if has_delta_nets(hf_config):
        required = "attention in all blocks (gated delta nets have not been tested here)"
    if has_latent_attention(hf_config):
        required = "attention that is not latent (MLA has not been tested here)"
    if required:
        raise ModelError(explain(what, required=required, found=f"model_type={hf_config.model_type!r}", fix=fix))


def check_structure(hf_config: Any, config: Config) -> None:
    """Raise ModelError for a model that trainer and rollout would not compute alike.

    Such a model has parts other than the language model, experts that this mode does not support, latent attention without a
    record, weights that are already quantized, or a setting that makes one side compute something else.

    Args:
        hf_config: the Hugging Face config of the whole model.
        config: of a mode with a quantized rollout.
    """
    what = f"model_type={getattr(hf_config, 'model_type', None)!r} with a quantized rollout"
    for required, found in _unhandled(hf_config, config):
        raise ModelError(explain(what, required=required, found=found, fix=f"use a dense text model, or {UNQUANTIZED}"))
    for required, found, fix in _other_settings(hf_config):
        raise ModelError(explain(what, required=required, found=found, fix=f"{fix} {UNQUANTIZED}"))


def check_device(hf_config: Any, device_type: str) -> None:
    """Raise ModelError for a mixture of experts on a device (torch's type) that has no product for experts."""
    family = record_of(hf_config)
    if family.mixture and device_type not in ("cpu", "cuda"):
        required = "a CPU or a CUDA device (no other has grouped FP8 products)"
        fix = f"use a dense model on this device, or {UNQUANTIZED}"
        raise ModelError(explain(f"experts of {family.title}", required=required, found=device_type, fix=fix))


def _unhandled(hf_config: Any, config: Config) -> Iterator[tuple[str, str]]:
    """Yield what is required, and what was found instead."""
    parts = [name for name, value in vars(hf_config).items() if hasattr(value, "model_type")]
    if parts and not (is_vision_language(hf_config) and config.fp8_rollout):
        vision = [family.model_type for family in FAMILIES.values() if family.tower]
        why = "in other models the vision tower would become FP8, and the two sides name layers differently"
        yield f"one text model, or with an FP8 rollout one of {', '.join(vision)} ({why})", " and ".join(sorted(parts))
    yield from (
        ("blocks of attention and MLP (state-space blocks have not been tested)", f"{name}={value}")
        for name in _STATE_SPACE
        if _counts(value := getattr(hf_config, name, None))
    )
    latent = has_latent_attention(hf_config)
    handled, hf_config = bool(record_of(hf_config).mixture), text_config(hf_config)
    experts = {name: getattr(hf_config, name, None) for name in EXPERTS}
    mixtures = [family.model_type for family in FAMILIES.values() if family.mixture]
    in_blocks = config.fp8_rollout and not config.channelwise and config.scales.square
    why = "others would stay in BF16, and the weight sync would fail"
    if handled and not in_blocks:
        named = f"scales per {config.granularity}" if config.scales.square else f"scale_format={config.scale_format!r}"
        why = f"precision={config.precision!r} with {named} does not quantize experts"
    if not handled or not in_blocks:
        others = f", or with an FP8 rollout in blocks one of {', '.join(mixtures)}"
        yield from (
            (f"a dense model{others} ({why})", f"{name}={value}") for name, value in experts.items() if _counts(value)
        )
    if _counts(getattr(hf_config, _LATENT, None)) and not latent:
        known = ", ".join(family.model_type for family in FAMILIES.values() if family.absorbed)
        why = "vLLM transforms MLA's weights once, so a weight sync would miss them"
        yield f"attention that reads its weights as they are, or {known}'s ({why})", f"{_LATENT}={getattr(hf_config, _LATENT)}"


def _other_settings(hf_config: Any) -> Iterator[tuple[str, str, str]]:
    """Yield what is required of a setting, what was found, and the start of the fix."""
    quantized = getattr(hf_config, "quantization_config", None) or getattr(hf_config, "compression_config", None)
    if quantized:
        named = quantized if isinstance(quantized, Mapping) else vars(quantized)
        keys = ("quant_method", "quant_algo")  # the second is ModelOpt's
        said = next((f"{key}={named[key]!r}" for key in keys if named.get(key)), f"the keys {', '.join(map(str, named))}")
        yield UNQUANTIZED_WEIGHTS, f"a quantization_config with {said}", "use a BF16 checkpoint, or use"
    family = family_of(hf_config)
    if family is None:
        return
    others = set(getattr(hf_config, "architectures", None) or ()) - {family.causal_lm}
    if others:
        required = f"architectures=['{family.causal_lm}'] (vLLM chooses its model by it, the trainer by model_type)"
        yield required, f"architectures={hf_config.architectures}", "use another model, or"
    text = text_config(hf_config)
    for setting in family.settings:
        if setting.everywhere and (found := setting.found(text)):
            fix = f"{setting.fix}, or use" if setting.fix else "use another model, or"
            required = f"{setting.key}={setting.values}" if setting.covered else setting.key
            yield f"{required} ({setting.reason})", found, fix
    rotated, turned = getattr(text, "partial_rotary_factor", None), getattr(text, "rope_parameters", None) or {}
    if rotated is not None and turned.get("partial_rotary_factor", rotated) != rotated:
        required = f"partial_rotary_factor={turned['partial_rotary_factor']}, as in rope_parameters (vLLM reads the one outside)"
        yield required, f"partial_rotary_factor={rotated}", "set both alike in config.json, or use"
    if (width := getattr(text, "head_dim", None)) and (family.plain_heads or family.absorbed):
        name, heads = "hidden_size / num_attention_heads", text.hidden_size // text.num_attention_heads
        if family.absorbed:
            name, heads = "qk_rope_head_dim", text.qk_rope_head_dim
        if width != heads:
            yield f"head_dim={heads}, which is {name} (vLLM ignores head_dim)", f"head_dim={width}", "use another model, or"
    if family.transposed and text.hidden_size in (text.moe_intermediate_size, 2 * text.moe_intermediate_size):
        required = "experts whose shapes tell transformers that they are stored transposed (it would load them as they are)"
        found = f"hidden_size={text.hidden_size}, moe_intermediate_size={text.moe_intermediate_size}"
        yield required, found, "use another model, or"
    if family.absorbed and not _one_magnitude(getattr(text, "rope_parameters", None) or {}):
        required = "mscale and mscale_all_dim together (with only one, trainer and vLLM scale rotary angles differently)"
        yield required, f"rope_parameters={text.rope_parameters}", "use another model, or"


def _one_magnitude(rope: Mapping[str, Any]) -> bool:
    """Whether both sides scale the cosines and sines of latent attention by the same number.

    vLLM uses ``m(mscale or 1) / m(mscale_all_dim or 0)``, with m(x) = 0.1 x ln(factor) + 1. transformers uses m(1) unless both
    are set.
    """
    alone, whole = rope.get("mscale"), rope.get("mscale_all_dim")
    return bool(alone and whole) or (not whole and alone in (None, 1))


def _counts(value: Any) -> bool:
    """Whether a number, or one of a list, is above zero."""
    items = value if isinstance(value, (list, tuple)) else [value]
    return any(isinstance(item, int) and item > 0 for item in items)


def check_code(settings: dict[str, Any], folder: str) -> None:
    """Raise ModelError if a checkpoint contains modeling code that the trainer would run.

    Args:
        settings: the content of its config.json.
        folder: where it is, for the message.
    """
    own = sorted(name for name in settings.get("auto_map") or {} if name.startswith(("AutoConfig", "AutoModel")))
    if own:
        required = "a model that transformers itself implements (nothing compares a checkpoint's own code with vLLM's)"
        found = f"auto_map for {', '.join(own)} in config.json"
        fix = f"remove auto_map from config.json if transformers knows the model, or use {UNQUANTIZED}"
        raise ModelError(explain(f"{folder} with trust_remote_code=True", required=required, found=found, fix=fix))
