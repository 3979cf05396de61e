"""Check and complete verl's configuration for Megatron with TransformerEngine. Imports no torch.

Megatron builds its layers from TransformerEngine (``jetrl_patch.backends.transformer_engine``). With ``fp8=e4m3`` and
``fp8_recipe=blockwise`` they compute in the same format as the rollout's backend "te".

FP8 parameters (``fp8_param``) are refused. Megatron initializes their FP32 masters from values that TransformerEngine keeps when
it creates a parameter. verl 0.9.1 loads the checkpoint after that and never reloads the masters, so the first optimizer step
would start from the wrong weights. BF16 parameters do not have this problem; for the weight sync, TransformerEngine's own
quantizer makes the bytes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from packaging.version import Version

from jetrl_patch.adapters.verl.yaml_settings import ACTOR, MODEL, REF, ROLLOUT, Select, named, runs
from jetrl_patch.config import SETTINGS, Config
from jetrl_patch.errors import ConfigError, ConflictError, JetrlError, ModelError, VersionError, explain
from jetrl_patch.models.families import covering, uncovered
from jetrl_patch.patching.guards import installed_version, is_installed
from jetrl_patch.registry import Journal
from jetrl_patch.trainer.rules import Rule, broken, is_set, more_than_one, other_than

STRATEGY = "megatron"
MEGATRON = f"{ACTOR}.megatron"
LAYERS = f"{MEGATRON}.override_transformer_config"
#: TransformerEngine reads this at import: "1" keeps FP32 scales, anything else rounds them to powers of two
SCALES = "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"
#: the first TransformerEngine with block scaling, according to Megatron's own check
TE_LEAST = "2.3"
#: TransformerEngine's FP8 layers in one transformer block: linear_qkv, linear_proj, linear_fc1, linear_fc2
PER_BLOCK = 4

#: the plugin's settings that Megatron needs
NEEDED = {"precision": SETTINGS["precision"].default, "align": "linear", "backend": "te"}

_BLOCKWISE = "fp8=e4m3 with fp8_recipe=blockwise, the rollout's format"
_EVERY_LAYER = "FP8 in every layer, as in the rollout"
_DENSE = "no expert parallelism (only dense models are supported)"
_BF16_MASTERS = "BF16 parameters (verl makes FP32 masters of FP8 ones before it loads the checkpoint, and never reloads them)"
_REMOVE = "remove it"
_FALSE = "set it to false"

RULES: tuple[Rule, ...] = (
    Rule(f"{LAYERS}.fp8", other_than("e4m3"), _BLOCKWISE, _REMOVE, "quantized", ConflictError),
    Rule(f"{LAYERS}.fp8_recipe", other_than("blockwise"), _BLOCKWISE, _REMOVE, "quantized", ConflictError),
    Rule(f"{LAYERS}.fp4", is_set, _BLOCKWISE, _REMOVE, "quantized", ConflictError),
    Rule(
        f"{ACTOR}.optim.override_optimizer_config.fp8_recipe", other_than("blockwise"), _BLOCKWISE, _REMOVE, "quantized",
        ConflictError,
    ),
    Rule(f"{LAYERS}.fp8_param", is_set, _BF16_MASTERS, _REMOVE, "quantized"),
    Rule(f"{MEGATRON}.override_ddp_config.fp8_param_gather", is_set, _BF16_MASTERS, _REMOVE, "quantized"),
    Rule(f"{LAYERS}.first_last_layers_bf16", is_set, _EVERY_LAYER, _REMOVE, "quantized"),
    Rule(f"{LAYERS}.transformer_impl", other_than("transformer_engine"), _EVERY_LAYER, _REMOVE, "quantized"),
    Rule(f"{LAYERS}.fp8_dot_product_attention", is_set, "attention in BF16", _REMOVE, "quantized"),
    Rule(f"{LAYERS}.fp8_multi_head_attention", is_set, "attention in BF16", _REMOVE, "quantized"),
    Rule(f"{MEGATRON}.dtype", other_than("bfloat16", "bf16"), "bfloat16", "set it to bfloat16", "quantized"),
    Rule(f"{MEGATRON}.expert_model_parallel_size", more_than_one, _DENSE, "set it to 1", "quantized"),
    Rule(f"{MEGATRON}.expert_tensor_parallel_size", more_than_one, _DENSE, "set it to null", "quantized"),
    Rule(f"{MEGATRON}.use_mbridge", lambda value: not value, "Megatron-Bridge's export", "set it to true", "quantized"),
    Rule(f"{MEGATRON}.vanilla_mbridge", is_set, "Megatron-Bridge's export", _FALSE, "quantized"),
    Rule(f"{MEGATRON}.dynamic_context_parallel", is_set, "false (verl supports FP8 only without it)", _FALSE, "quantized"),
    Rule(f"{MEGATRON}.qat.enable", is_set, "no quantization but jetrl_patch's", _FALSE, "quantized", ConflictError),
    Rule(
        f"{ROLLOUT}.checkpoint_engine.backend", other_than("naive"), "naive (Megatron's export over others is untested)",
        "set it to naive", "quantized",
    ),
    Rule(f"{MODEL}.mtp.enable", is_set, "the same layers as in the rollout", _FALSE, "quantized"),
)  # fmt: skip


def chosen(select: Select, asked: Config) -> Config:
    """Set ``align="linear"`` and ``backend="te"``, which Megatron needs, in the unresolved settings ``asked`` if left open."""
    if not asked.fp8_train or not runs(STRATEGY, select, asked):
        return asked
    return asked.replace(**{name: value for name, value in NEEDED.items() if getattr(asked, name) == SETTINGS[name].default})


def problems(select: Select, config: Config) -> Iterator[JetrlError]:
    """Yield an error for each setting that is unsupported with Megatron, the plugin's own settings first."""
    for what, required, value, fix in _modes(config):
        yield ConfigError(explain(f"{what} with {named(ACTOR)}.strategy=megatron", required=required, found=value, fix=fix))
    yield from broken(RULES, select, config, named)
    missing = _missing()
    if missing is not None:
        yield missing


def _modes(config: Config) -> Iterator[tuple[str, str, str, str]]:
    """Yield (setting, required, found, fix) for each wrong setting of the plugin; one for all of ``NEEDED``."""
    align = config.resolved_align if config.fp8_train else config.align or NEEDED["align"]  # unset in other precisions
    found = {"precision": config.precision, "align": align, "backend": config.backend}
    wrong = [name for name, value in NEEDED.items() if found[name] != value]
    if wrong:
        value = ", ".join(f"{name}={found[name]!r}" for name in wrong)
        required = f"{', '.join(f'{name}={value!r}' for name, value in NEEDED.items())} (Megatron has its own norm, RoPE and "
        required += "attention, and its FP8 layers are TransformerEngine's)"
        variables = " ".join(f"{SETTINGS[name].variable}={needed}" for name, needed in NEEDED.items())
        yield value, required, value, f"set {variables}, or strategy=fsdp2"
    if config.sync == "delta":
        yield "sync='delta'", "sync='full' (untested with Megatron's export)", "'delta'", "drop sync, or set strategy=fsdp2"
    if not config.fp8_train:
        return
    for name in ("exclude", "on_cut", "invariant_scale", "fp8_all_gather"):
        value = getattr(config, name)
        if value != SETTINGS[name].default:
            required = "the default (TransformerEngine's layers all use one recipe)"
            yield f"{name}={value!r}", required, repr(value), f"drop {name}, or set strategy=fsdp2"


def _missing() -> VersionError | None:
    """Return one error for all packages that are missing or too old."""
    te = installed_version("transformer_engine")
    wrong = [f"no {name}" for name in ("megatron.core", "megatron.bridge") if not is_installed(name)]
    if te is None or Version(te) < Version(TE_LEAST):
        wrong.append("no transformer_engine" if te is None else f"transformer_engine {te}")
    if not wrong:
        return None
    required = f"megatron-core, megatron-bridge and transformer_engine>={TE_LEAST}"
    fix = "install them where verl runs, or set strategy=fsdp2"
    return VersionError(explain("verl's Megatron engine in FP8", required=required, found=", ".join(wrong), fix=fix))


def wanted(select: Select) -> dict[str, Any]:
    """Return the verl settings that FP8 training needs: path -> value."""
    values: dict[str, Any] = {f"{MODEL}.use_remove_padding": True}  # verl supports FP8 only with packed sequences
    for path in (ACTOR, REF):  # the reference inherits the actor's unless the user overrides them
        if select(f"{path}.megatron") is not None:
            layers = f"{path}.megatron.override_transformer_config"
            values |= {f"{layers}.fp8": "e4m3", f"{layers}.fp8_recipe": "blockwise"}
    return values


def check_model(hf_config: Any, trainer_tp: int) -> None:
    """Check that the 128x128 blocks of Megatron's merged matrices are those of the rollout's layers.

    ``linear_qkv`` interleaves the heads of q, k and v. ``linear_fc1`` stacks gate on up, on each rank. Raises ModelError if the
    family is unsupported, or if a block would contain rows of two layers; the error names all such widths.
    """
    if getattr(hf_config, "model_type", None) not in covering("megatron"):
        required, found = f"one of {', '.join(covering('megatron'))}", uncovered(hf_config, "megatron")
        raise ModelError(explain("the model with Megatron", required=required, found=found, fix="set strategy=fsdp2"))
    heads = int(hf_config.num_attention_heads)
    width = int(getattr(hf_config, "head_dim", None) or hf_config.hidden_size // heads)
    inner = int(hf_config.intermediate_size)
    wrong = [f"head_dim={width}"] if width % 128 else []
    wrong += [f"intermediate_size={inner} over {trainer_tp} ranks"] if inner % (128 * trainer_tp) else []
    if wrong:
        required = "a head_dim and a per-rank MLP width in multiples of 128, so that no FP8 block spans two layers"
        fix = "change megatron.tensor_model_parallel_size, or set strategy=fsdp2"
        raise ModelError(explain("the model with Megatron", required=required, found=", ".join(wrong), fix=fix))


def _scales(config: Config) -> str:
    return str(int(not config.scales.powers_of_two))


def check_scales(config: Config) -> None:
    """Raise ConflictError if the environment gives TransformerEngine another scale format than ``config``."""
    given = os.environ.get(SCALES)
    if config.fp8_train and config.backend == "te" and given not in (None, "", _scales(config)):
        required, found = f"{SCALES}={_scales(config)}", f"{given!r} in the environment"
        what, fix = f"scale_format={config.scale_format!r} with TransformerEngine", "unset the variable, or change scale_format"
        raise ConflictError(explain(what, required=required, found=found, fix=fix))


def export_scales(config: Config, journal: Journal) -> None:
    """Set ``SCALES`` for this process and its children, before TransformerEngine is imported. The journal undoes it."""
    if config.fp8_train and config.backend == "te":
        reason = "TransformerEngine reads the format of its block scales from this variable, once, at import"
        journal.set_item(os.environ, SCALES, _scales(config), target=f"os.environ[{SCALES!r}]", reason=reason)
