"""verl's configuration for Megatron with TransformerEngine: checked, and completed for the unified flow.

Megatron's layers are TransformerEngine's (``jetrl_patch.fp8.transformer_engine``): with ``fp8=e4m3`` and ``fp8_recipe=blockwise``
they compute in this project's format, and the rollout computes in it too, under the backend name "te".

Why FP8 parameters (``fp8_param``) are refused: Megatron takes the FP32 masters of an FP8 parameter from the values that
TransformerEngine kept when the parameter was made; verl 0.9.1 loads the checkpoint afterwards and never reloads the
masters, so the first optimizer step would start from other weights. With BF16 parameters nothing of that happens, and the
sync asks TransformerEngine's own quantizer for the bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from packaging.version import Version

from jetrl_patch.adapters.base import Journal
from jetrl_patch.adapters.verl.paths import ACTOR, MODEL, REF, named
from jetrl_patch.config import Config
from jetrl_patch.errors import ConfigError, ConflictError, JetrlError, ModelError, VersionError, explain
from jetrl_patch.families import covering
from jetrl_patch.patching.guards import installed_version, is_installed
from jetrl_patch.trainer.rules import Rule, broken, is_set, more_than_one, other_than

__all__ = ["STRATEGY", "check_model", "check_scales", "export_scales", "is_chosen", "problems", "wanted"]

STRATEGY = "megatron"
MEGATRON = f"{ACTOR}.megatron"
LAYERS = f"{MEGATRON}.override_transformer_config"
#: what TransformerEngine reads when it is imported: "1" keeps FP32 scales, else they are powers of two
SCALES = "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"
#: the first TransformerEngine with block scaling, of which Megatron says the same
TE_LEAST = "2.3"
#: FP8 layers of TransformerEngine in one block of them: linear_qkv, linear_proj, linear_fc1, linear_fc2
PER_BLOCK = 4

_BLOCKWISE = "e4m3 with fp8_recipe=blockwise, the format of this project"
_EVERY_LAYER = "FP8 in every layer, as the rollout has it"
_ONE_STAGE = "one stage and no experts: a sync over several was not tried"
_BF16_MASTERS = (
    "BF16 parameters: verl builds the optimizer of FP8 ones without the checkpoint's values, and reloads no masters"
)
_OFF = "leave it out"

RULES: tuple[Rule, ...] = (
    Rule(f"{LAYERS}.fp8", other_than("e4m3"), _BLOCKWISE, _OFF, "quantized", ConflictError),
    Rule(f"{LAYERS}.fp8_recipe", other_than("blockwise"), _BLOCKWISE, _OFF, "quantized", ConflictError),
    Rule(f"{LAYERS}.fp4", is_set, _BLOCKWISE, _OFF, "quantized", ConflictError),
    Rule(
        f"{ACTOR}.optim.override_optimizer_config.fp8_recipe", other_than("blockwise"), _BLOCKWISE, _OFF, "quantized",
        ConflictError,
    ),
    Rule(f"{LAYERS}.fp8_param", is_set, _BF16_MASTERS, _OFF, "quantized"),
    Rule(f"{MEGATRON}.override_ddp_config.fp8_param_gather", is_set, _BF16_MASTERS, _OFF, "quantized"),
    Rule(f"{LAYERS}.first_last_layers_bf16", is_set, _EVERY_LAYER, _OFF, "quantized"),
    Rule(f"{LAYERS}.transformer_impl", other_than("transformer_engine"), _EVERY_LAYER, _OFF, "quantized"),
    Rule(f"{LAYERS}.fp8_dot_product_attention", is_set, "attention in BF16", _OFF, "quantized"),
    Rule(f"{LAYERS}.fp8_multi_head_attention", is_set, "attention in BF16", _OFF, "quantized"),
    Rule(f"{MEGATRON}.dtype", other_than("bfloat16", "bf16"), "bfloat16", "set it so", "quantized"),
    Rule(f"{MEGATRON}.pipeline_model_parallel_size", more_than_one, _ONE_STAGE, "set it to 1", "quantized"),
    Rule(f"{MEGATRON}.virtual_pipeline_model_parallel_size", more_than_one, _ONE_STAGE, "set it to null", "quantized"),
    Rule(f"{MEGATRON}.expert_model_parallel_size", more_than_one, _ONE_STAGE, "set it to 1", "quantized"),
    Rule(f"{MEGATRON}.expert_tensor_parallel_size", more_than_one, _ONE_STAGE, "set it to null", "quantized"),
    Rule(f"{MEGATRON}.use_mbridge", lambda value: not value, "Megatron-Bridge's export", "set it to true", "quantized"),
    Rule(f"{MEGATRON}.vanilla_mbridge", is_set, "Megatron-Bridge's export", "set it to false", "quantized"),
    Rule(f"{MEGATRON}.use_megatron_fsdp", is_set, "whole weights of each layer on a rank", "set it to false", "quantized"),
    Rule(f"{MEGATRON}.dynamic_context_parallel", is_set, "what verl has FP8 for", "set it to false", "quantized"),
    Rule(
        f"{MEGATRON}.qat.enable", is_set, "no other quantization beside jetrl_patch", "set it to false", "quantized",
        ConflictError,
    ),
    Rule(f"{MODEL}.use_remove_padding", lambda value: not value, "what verl has FP8 for", "set it to true", "quantized"),
    Rule(f"{MODEL}.mtp.enable", is_set, "the layers that the rollout has", "set it to false", "quantized"),
)  # fmt: skip

Select = Callable[[str], Any]


def is_chosen(select: Select, config: Config) -> bool:
    """Whether these settings are ours to check: Megatron trains, in a mode that changes the trainer or the rollout.

    Args:
        select: gives verl's setting at a dotted path, None where there is none.
    """
    return config.quantized_rollout and STRATEGY in (select(f"{ACTOR}.strategy"), select(f"{REF}.strategy"))


def problems(select: Select, config: Config) -> Iterator[JetrlError]:
    """What cannot be kept with Megatron, as the errors to raise; first what the mode itself cannot."""
    found = {path: select(f"{path}.strategy") for path in (ACTOR, REF)}
    if any(value is not None and value != STRATEGY for value in found.values()):
        asked, fix = "one engine for actor and reference", "use model_engine=megatron"
        yield ConfigError(explain(f"verl settings {ACTOR}.strategy and ref", required=asked, found=str(found), fix=fix))
        return
    for what, asked, value, fix in _modes(config):
        yield ConfigError(explain(f"{what} with {named(ACTOR)}.strategy=megatron", required=asked, found=value, fix=fix))
    yield from broken(RULES, select, config, named)
    error = _missing()
    if error is not None:
        yield error


def _modes(config: Config) -> Iterator[tuple[str, str, str, str]]:
    if not config.fp8_train:
        yield (
            f"precision={config.precision!r}",
            "'fp8-unified' or 'bf16': a quantized rollout beside Megatron in BF16 was not tried",
            repr(config.precision),
            "use one of them, or strategy=fsdp2",
        )
        return
    if config.exact:
        yield (
            "align='exact'",
            "'linear': Megatron's norm, RoPE and attention are its own, and TransformerEngine's GEMM promises no row its bits",
            "'exact'",
            "set align='linear' (JETRL_ALIGN=linear), or strategy=fsdp2",
        )
    if config.backend != "te":
        asked = "'te', which both sides record: TransformerEngine in the trainer, the same GEMM in the rollout"
        yield f"backend={config.backend!r}", asked, repr(config.backend), "set backend='te' (JETRL_BACKEND=te)"
    for name in ("exclude", "invariant_scale", "fp8_all_gather"):
        value = getattr(config, name)
        if value not in ((), None, False):
            asked = "what TransformerEngine's layers do: one recipe for all of them, left as they are"
            yield f"{name}={value!r}", asked, repr(value), "leave it out, or use strategy=fsdp2"


def _missing() -> VersionError | None:
    """What is not installed here, or is too old, in one error."""
    te = installed_version("transformer_engine")
    wrong = [f"no {name}" for name in ("megatron.core", "megatron.bridge") if not is_installed(name)]
    if te is None or Version(te) < Version(TE_LEAST):
        wrong.append("no transformer_engine" if te is None else f"transformer_engine {te}")
    if not wrong:
        return None
    asked = f"megatron-core, megatron-bridge and transformer_engine>={TE_LEAST}"
    fix = "install them where verl runs, or use strategy=fsdp2"
    return VersionError(explain("verl's Megatron engine in FP8", required=asked, found=", ".join(wrong), fix=fix))


def wanted(select: Select) -> dict[str, Any]:
    """verl settings that the unified flow needs: path -> value."""
    values: dict[str, Any] = {}
    for path in (ACTOR, REF):  # the reference's are the actor's, unless its user has written them out
        if select(f"{path}.megatron") is not None:
            layers = f"{path}.megatron.override_transformer_config"
            values |= {f"{layers}.fp8": "e4m3", f"{layers}.fp8_recipe": "blockwise"}
    return values


def check_model(hf_config: Any, trainer_tp: int) -> None:
    """Do TransformerEngine's blocks of Megatron's merged and split matrices lie where those of the rollout's layers lie?

    ``linear_qkv`` takes turns between heads of q, k and v; ``linear_fc1`` is gate over up, on each rank.

    Raises:
        ModelError: another family, or widths at which a 128x128 block would hold rows of two layers, with all of them.
    """
    family = getattr(hf_config, "model_type", None)
    if family not in covering("megatron"):
        asked = f"one of {', '.join(covering('megatron'))}, whose layers in Megatron are known"
        raise ModelError(explain("model with Megatron", required=asked, found=f"model_type={family!r}", fix="use strategy=fsdp2"))
    heads = int(hf_config.num_attention_heads)
    width = int(getattr(hf_config, "head_dim", None) or hf_config.hidden_size // heads)
    inner = int(hf_config.intermediate_size)
    wrong = [f"head_dim={width}"] if width % 128 else []
    wrong += [f"intermediate_size={inner} over {trainer_tp} ranks"] if inner % (128 * trainer_tp) else []
    if wrong:
        raise ModelError(
            explain(
                "model with Megatron",
                required="heads and a rank's part of the MLP in multiples of 128, so that no block of 128 holds two layers",
                found=", ".join(wrong),
                fix="use another tensor_model_parallel_size, or strategy=fsdp2",
            )
        )


def _scales(config: Config) -> str:
    return "1" if config.scale_format == "fp32" else "0"


def check_scales(config: Config, environ: Mapping[str, str] | None = None) -> None:
    """Raise ConflictError where the environment asks TransformerEngine for other scales than ``config`` does."""
    given = (os.environ if environ is None else environ).get(SCALES)
    if config.fp8_train and config.backend == "te" and given not in (None, "", _scales(config)):
        raise ConflictError(
            explain(
                f"scale_format={config.scale_format!r} with TransformerEngine",
                required=f"{SCALES}={_scales(config)}",
                found=f"{given!r} in the environment",
                fix="unset the variable, or set scale_format accordingly",
            )
        )


def export_scales(config: Config, journal: Journal) -> None:
    """Set the variable for this process and its children, before TransformerEngine is imported; undone with the rest."""
    if config.fp8_train and config.backend == "te":
        reason = "TransformerEngine reads the format of block scales from it, once, at import"
        journal.set_item(os.environ, SCALES, _scales(config), target=f"os.environ[{SCALES!r}]", reason=reason)
