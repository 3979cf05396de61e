"""Check verl's configuration for its VeOmni engine: FSDP2 around VeOmni's own model classes. Imports no torch.

VeOmni keeps transformers' linear layers, parameters and names, so the layers are converted to FP8 as with FSDP. Its norms, RoPE
and attention are its own; exact mode does not replace them. Its experts have kernels of their own (see ``model.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from packaging.specifiers import SpecifierSet

from jetrl_patch.adapters.verl.yaml_settings import ACTOR, MODEL, REF, ROLLOUT, Select, named, whole
from jetrl_patch.config import SETTINGS, Config
from jetrl_patch.errors import ConfigError, ConflictError, JetrlError, ModelError, VersionError, explain
from jetrl_patch.models.families import covering, titles, uncovered
from jetrl_patch.patching.guards import installed_version
from jetrl_patch.trainer.rules import Rule, broken, is_set, more_than_one, other_than, positive

STRATEGY = "veomni"
#: the version that ``tests/verl/test_veomni_engine.py`` runs; 0.1.11 fails with transformers 5.10
VERSIONS = SpecifierSet("==0.1.12")
ENGINES = (f"{ACTOR}.veomni", f"{REF}.veomni")
PRECISIONS = ("fp8-unified", "fp8-rollout")
#: the plugin's settings that are untested with VeOmni
_UNTESTED = ("sync", "invariant_scale", "guard_sqnr", "smoothing")
_INSTEAD = "set strategy=fsdp2"

_FLASH = tuple(f"{prefix}flash_attention_{n}{suffix}" for n in (2, 3) for prefix, suffix in (("", ""), ("veomni_", "_with_sp")))
_ATTENTION = ("eager", "sdpa", *_FLASH)
_WHOLE_EXPERTS = "1 (with experts on several ranks VeOmni runs its own kernels; untested)"
_PACKED = "packed sequences (the engine is untested without them)"
_FALSE = "set it to false"


def _in_each(name: str, bad: Callable[[Any], bool], required: str, fix: str, error: type[JetrlError] = ConfigError) -> list[Rule]:
    return [Rule(f"{engine}.{name}", bad, required, fix, "quantized", error) for engine in ENGINES]


RULES: tuple[Rule, ...] = (
    *_in_each("expert_parallel_size", more_than_one, _WHOLE_EXPERTS, "set it to 1"),
    *_in_each("attn_implementation", other_than(*_ATTENTION), f"one of {', '.join(_ATTENTION)}", "set it to flash_attention_2"),
    *_in_each("qat_implementation", other_than("none"), "no quantization but jetrl_patch's", "set it to none", ConflictError),
    *_in_each("router_replay.mode", other_than("disabled"), "no replay of routes (untested with VeOmni)", "set it to disabled"),
    *_in_each("init_device", other_than("meta"), "meta, the only device from which VeOmni shards a model", "set it to meta"),
    *_in_each("mixed_precision", lambda on: not on, "FP32 parameters (untested with BF16 ones)", "set it to true"),
    *_in_each("enable_fsdp_offload", is_set, "parameters on the device (untested with FSDP2's offload)", _FALSE),
    *_in_each("enable_async_activation_offload", is_set, "activations on the device (untested with VeOmni's offload)", _FALSE),
    *_in_each("enable_reentrant", is_set, "non-reentrant checkpointing (the other is untested)", _FALSE),
    *_in_each("force_use_huggingface", is_set, "VeOmni's own model class", _FALSE),
    *_in_each("basic_modules", is_set, "whole blocks as units of FSDP2 (others are untested)", "leave it empty"),
    Rule(f"{MODEL}.use_remove_padding", lambda on: not on, _PACKED, "set it to true", "quantized"),
    Rule(f"{MODEL}.lora_rank", positive, "full weights (verl's VeOmni engine builds no adapters)", _INSTEAD, "quantized"),
    Rule(f"{MODEL}.lora_adapter_path", is_set, "full weights (verl's VeOmni engine builds no adapters)", _INSTEAD, "quantized"),
    Rule(
        f"{ROLLOUT}.checkpoint_engine.backend", other_than("naive"), "naive (VeOmni's export over others is untested)",
        "set it to naive", "quantized",
    ),
)  # fmt: skip


def problems(select: Select, config: Config) -> Iterator[JetrlError]:
    """Yield an error for each setting that is unsupported with VeOmni, the plugin's own settings first."""
    for what, required, value, fix in _modes(config):
        yield ConfigError(explain(f"{what} with {named(ACTOR)}.strategy=veomni", required=required, found=value, fix=fix))
    yield from broken(RULES, select, config, named)
    yield from _parallel(select)
    version = installed_version("veomni")
    if version is None or version not in VERSIONS:
        found_version = "none" if version is None else version
        fix = "install that version where verl runs, or set strategy=fsdp2"
        yield VersionError(explain("verl's VeOmni engine", required=f"veomni{VERSIONS}", found=found_version, fix=fix))


def _modes(config: Config) -> Iterator[tuple[str, str, str, str]]:
    """Yield (setting, required, found, fix) for each wrong setting of the plugin."""
    if config.precision not in PRECISIONS:
        required, fix = f"{' or '.join(PRECISIONS)} (others are untested with VeOmni)", "set precision to one of them"
        yield f"precision={config.precision!r}", required, repr(config.precision), f"{fix}, or strategy=fsdp2"
    if config.exact:
        required = "align='linear' (VeOmni has its own norm, RoPE and attention)"
        yield "align='exact'", required, "'exact'", f"set {SETTINGS['align'].variable}=linear, or strategy=fsdp2"
    for name in _UNTESTED:
        value, default = getattr(config, name), SETTINGS[name].default
        if value != default:
            yield f"{name}={value!r}", f"{default!r} (others are untested with VeOmni)", repr(value), f"drop {name}"


def _parallel(select: Select) -> Iterator[JetrlError]:
    """Yield an error for each size that VeOmni's workers would reject only after start-up, or compute wrongly with."""
    ranks = whole(select, "trainer.nnodes") * whole(select, "trainer.n_gpus_per_node")
    if ranks == 1:
        required, fix = "two ranks or more (VeOmni does not shard for one)", "train on more ranks, or set strategy=fsdp2"
        yield ConfigError(explain(f"{named(ACTOR)}.strategy=veomni", required=required, found="1 rank", fix=fix))
    for engine in ENGINES:
        size, attention = whole(select, f"{engine}.ulysses_parallel_size"), select(f"{engine}.attn_implementation")
        if size > 1 and attention is not None and attention not in _FLASH:
            required, fix = "flash attention, the only one with VeOmni's all-to-all", "set it to flash_attention_2"
            what = f"{named(engine)}.attn_implementation with ulysses_parallel_size={size}"
            yield ConfigError(explain(what, required=required, found=repr(attention), fix=fix))


def check_model(hf_config: Any) -> None:
    """Raise ModelError for a family whose VeOmni layers were never compared with those of transformers and of the rollout."""
    covered = covering("veomni")
    if getattr(hf_config, "model_type", None) not in covered:
        found, required = uncovered(hf_config, "veomni"), f"{titles(covered.values())}, the families compared with the rollout"
        raise ModelError(explain("the model with VeOmni", required=required, found=found, fix=_INSTEAD))
