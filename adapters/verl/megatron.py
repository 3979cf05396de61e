"""Check and complete verl's configuration for Megatron. Imports no torch.

In exact mode Megatron builds its layers from the plugin's modules (``registry.Parallel``). With ``backend="te"`` it builds them
from TransformerEngine (``jetrl_patch.backends.transformer_engine``), in ``align="linear"``: with ``fp8=e4m3`` and
``fp8_recipe=blockwise`` they compute in the same format as the rollout's backend "te". If only the rollout is quantized, the
layers are Megatron's own, in BF16, and a sync quantizes what the bridge exports.

TransformerEngine's FP8 parameters (``fp8_param``) are refused. Megatron initializes their FP32 masters from values that
TransformerEngine keeps when it creates a parameter. verl 0.9.1 loads the checkpoint after that and never reloads the masters, so
the first optimizer step would start from the wrong weights. BF16 parameters do not have this problem; for the weight sync,
TransformerEngine's own quantizer makes the bytes.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from packaging.requirements import Requirement
from packaging.version import Version

from jetrl_patch._versions import MEGATRON as MEGATRON_CORE
from jetrl_patch.adapters.verl.yaml_settings import ACTOR, MODEL, REF, ROLLOUT, Select, named, runs, whole
from jetrl_patch.config import SETTINGS, Config
from jetrl_patch.errors import ConfigError, ConflictError, JetrlError, ModelError, VersionError, explain
from jetrl_patch.models.families import covering, uncovered
from jetrl_patch.models.structure import expert_sizes, has_latent_attention, key_heads
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

#: the plugin's settings that go with ``backend="te"``
WITH_TE = {"precision": SETTINGS["precision"].default, "align": "linear", "backend": "te"}

_BLOCKWISE = "fp8=e4m3 with fp8_recipe=blockwise, the rollout's format"
_EVERY_LAYER = "FP8 in every layer, as in the rollout"
_WHOLE = "whole experts on each rank"
_BF16_MASTERS = "BF16 parameters (verl makes FP32 masters of FP8 ones before it loads the checkpoint, and never reloads them)"
_EXPORT = "the distributed optimizer, whose buffers verl 0.9.1's weight sync reads"
_OWN_HEAD = "exact mode's own head and log-softmax"
_MAIN = "verl.trainer.main_ppo (the asynchronous programs are untested with Megatron)"
_REMOVE = "remove it"
_FALSE = "set it to false"
_TRUE = "set it to true"
_OPTIMIZER = f"{ACTOR}.optim.override_optimizer_config"

#: with any layers, Megatron's own in BF16 included
_SYNC_RULES: tuple[Rule, ...] = (
    Rule(f"{MEGATRON}.dtype", other_than("bfloat16", "bf16"), "bfloat16", "set it to bfloat16", "quantized"),
    Rule(f"{MEGATRON}.use_mbridge", lambda value: not value, "a bridge's export", _TRUE, "quantized"),
    Rule(f"{MEGATRON}.qat.enable", is_set, "no quantization but jetrl_patch's", _FALSE, "quantized", ConflictError),
    Rule(f"{MODEL}.mtp.enable", is_set, "the same layers as in the rollout", _FALSE, "quantized"),
)  # fmt: skip
#: with layers in FP8, the plugin's or TransformerEngine's
_FP8_RULES: tuple[Rule, ...] = (
    Rule(f"{MEGATRON}.expert_tensor_parallel_size", more_than_one, _WHOLE, "set it to 1", "quantized"),
    Rule(f"{MEGATRON}.dynamic_context_parallel", is_set, "false (verl supports FP8 only without it)", _FALSE, "quantized"),
)  # fmt: skip
#: with Megatron's own layers, if only the rollout is quantized
_BF16_RULES: tuple[Rule, ...] = tuple(
    Rule(path, is_set, "BF16 in the trainer", f"remove it, or use precision={WITH_TE['precision']!r}", "quantized", ConflictError)
    for path in (
        f"{LAYERS}.fp8", f"{LAYERS}.fp4", f"{LAYERS}.fp8_param", f"{MEGATRON}.override_ddp_config.fp8_param_gather",
        f"{_OPTIMIZER}.fp8_recipe",
    )
)  # fmt: skip
_TE_RULES: tuple[Rule, ...] = (
    Rule(f"{MEGATRON}.expert_model_parallel_size", more_than_one, "a model without experts", "set it to 1", "quantized"),
    Rule(f"{LAYERS}.fp8", other_than("e4m3"), _BLOCKWISE, _REMOVE, "quantized", ConflictError),
    Rule(f"{LAYERS}.fp8_recipe", other_than("blockwise"), _BLOCKWISE, _REMOVE, "quantized", ConflictError),
    Rule(f"{LAYERS}.fp4", is_set, _BLOCKWISE, _REMOVE, "quantized", ConflictError),
    Rule(f"{_OPTIMIZER}.fp8_recipe", other_than("blockwise"), _BLOCKWISE, _REMOVE, "quantized", ConflictError),
    Rule(f"{LAYERS}.fp8_param", is_set, _BF16_MASTERS, _REMOVE, "quantized"),
    Rule(f"{MEGATRON}.override_ddp_config.fp8_param_gather", is_set, _BF16_MASTERS, _REMOVE, "quantized"),
    Rule(f"{LAYERS}.first_last_layers_bf16", is_set, _EVERY_LAYER, _REMOVE, "quantized"),
    Rule(f"{LAYERS}.transformer_impl", other_than("transformer_engine"), _EVERY_LAYER, _REMOVE, "quantized"),
    Rule(f"{LAYERS}.fp8_dot_product_attention", is_set, "attention in BF16", _REMOVE, "quantized"),
    Rule(f"{LAYERS}.fp8_multi_head_attention", is_set, "attention in BF16", _REMOVE, "quantized"),
    Rule(f"{MEGATRON}.vanilla_mbridge", is_set, "Megatron-Bridge's export", _FALSE, "quantized"),
    Rule(
        f"{ROLLOUT}.checkpoint_engine.backend", other_than("naive"), "naive (TransformerEngine's export over others is untested)",
        "set it to naive", "quantized",
    ),
)  # fmt: skip
_EXACT_RULES: tuple[Rule, ...] = (
    Rule(f"{MEGATRON}.use_distributed_optimizer", lambda value: not value, _EXPORT, _TRUE, "exact"),
    Rule(f"{MEGATRON}.use_megatron_fsdp", is_set, "Megatron's own tensor and pipeline parallelism", _FALSE, "exact"),
    Rule(f"{MEGATRON}.use_dist_checkpointing", is_set, "a Hugging Face checkpoint to start from", _FALSE, "exact"),
    Rule("distillation.enabled", is_set, _OWN_HEAD, _FALSE, "exact"),
    Rule("async_training", is_set, _MAIN, "use it", "exact"),
    Rule(f"{MEGATRON}.override_mcore_model_config", bool, "the model in config.json", "set it to {}", "exact"),
)  # fmt: skip

RULES = (*_SYNC_RULES, *_FP8_RULES, *_TE_RULES, *_EXACT_RULES)

#: keys of ``override_transformer_config`` that change nothing that exact mode promises: how Megatron recomputes and distributes
#: layers, and fusions and kernels of modules that the plugin replaces
_HARMLESS = (
    "recompute_granularity", "recompute_modules", "recompute_method", "recompute_num_layers", "distribute_saved_activations",
    "attention_backend", "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split", "pipeline_model_parallel_layout",
    "use_cpu_initialization", "bias_dropout_fusion", "bias_activation_fusion", "masked_softmax_fusion", "persist_layer_norm",
    "apply_rope_fusion", "moe_permute_fusion", "gradient_accumulation_fusion", "variable_seq_lengths",
    "deallocate_pipeline_outputs", "batch_p2p_comm", "overlap_p2p_comm", "sequence_parallel", "cp_comm_type",
    "moe_grouped_gemm", "moe_router_dtype", "moe_enable_deepep", "moe_token_dispatcher_type", "moe_shared_expert_overlap",
)  # fmt: skip
#: kinds of load-balancing losses that exact mode has; Megatron's other ones need every rank's batch, or route otherwise
_BALANCING = ("none", "aux_loss", "seq_aux_loss")
#: losses of routers, which change no bit of a forward pass -> whether exact mode has a value
_LOSSES: dict[str, Callable[[Any], bool]] = {
    "moe_router_load_balancing_type": lambda kind: kind in _BALANCING,
    **dict.fromkeys(
        ("moe_aux_loss_coeff", "moe_z_loss_coeff"), lambda factor: isinstance(factor, (int, float)) and factor >= 0
    ),
}  # fmt: skip
#: the same of ``override_ddp_config``
_HARMLESS_DDP = ("grad_reduce_in_fp32", "bucket_size", "overlap_grad_reduce", "average_in_collective")


#: fusions that Megatron-Bridge turns on for some families, and for which it requires TransformerEngine
NEEDS_TE = ("apply_rope_fusion", "moe_permute_fusion")


def uses_te(config: Config) -> bool:
    """Whether Megatron's layers are TransformerEngine's."""
    return config.backend == "te"


def chosen(select: Select, asked: Config) -> Config:
    """For TransformerEngine's layers, set both ``align`` and ``backend`` in the unresolved settings ``asked`` if one is given."""
    if not asked.fp8_train or not runs(STRATEGY, select, asked):
        return asked
    if uses_te(asked) and asked.align is None:
        return asked.replace(align=WITH_TE["align"])
    if asked.align == WITH_TE["align"] and asked.backend == SETTINGS["backend"].default:
        return asked.replace(backend=WITH_TE["backend"])
    return asked


def problems(select: Select, config: Config) -> Iterator[JetrlError]:
    """Yield an error for each setting that is unsupported with Megatron, the plugin's own settings first."""
    for what, required, value, fix in _modes(config):
        yield ConfigError(explain(f"{what} with {named(ACTOR)}.strategy=megatron", required=required, found=value, fix=fix))
    te = uses_te(config)
    exact, kind = _EXACT_RULES if config.exact and not te else (), _FP8_RULES if config.fp8_train else _BF16_RULES
    yield from broken((*_SYNC_RULES, *kind, *(_TE_RULES if te else ()), *exact), select, config, named)
    if exact:
        yield from _unknown(select)
        yield from _ranks(select)
    missing = _missing(te, bool(select(f"{MEGATRON}.vanilla_mbridge")))
    if missing is not None:
        yield missing


def _modes(config: Config) -> Iterator[tuple[str, str, str, str]]:
    """Yield (setting, required, found, fix) for each wrong setting of the plugin."""
    linear = " ".join(f"{SETTINGS[name].variable}={value}" for name, value in WITH_TE.items())
    exact = f"{SETTINGS['precision'].variable}={WITH_TE['precision']} {SETTINGS['align'].variable}=exact"
    te = uses_te(config) and {name: getattr(config, name) for name in WITH_TE} == WITH_TE
    if not te and (uses_te(config) or (config.fp8_train and not config.exact)):
        align = config.resolved_align if config.fp8_train else config.align or "exact"
        value = f"precision={config.precision!r}, align={align!r}, backend={config.backend!r}"
        required = "align='exact', whose layers are the plugin's, or align='linear' with backend='te', TransformerEngine's"
        yield value, f"precision={WITH_TE['precision']!r} and {required}", value, f"set {exact}, or {linear}, or strategy=fsdp2"
    if config.sync == "delta" and te:
        yield "sync='delta'", "sync='full' (untested with TransformerEngine)", "'delta'", "drop sync, or set strategy=fsdp2"
    for name in _ONE_FOR_ALL:
        value = getattr(config, name)
        if value != SETTINGS[name].default:
            required = "the default (Megatron merges layers, and has one format for all)"
            yield f"{name}={value!r}", required, repr(value), f"drop {name}, or set strategy=fsdp2"
    if config.exact and not config.scales.square:
        required, fix = "scales of 128x128 blocks", "use pow2 or fp32, or set strategy=fsdp2"
        yield f"scale_format={config.scale_format!r}", required, repr(config.scale_format), fix


#: settings that treat layers one by one, or that are built on modules of a Hugging Face model
_ONE_FOR_ALL = (
    "exclude", "on_cut", "invariant_scale", "fp8_all_gather", "guard_sqnr", "smoothing", "monitor_layers", "monitor_action",
)  # fmt: skip


def _unknown(select: Select) -> Iterator[JetrlError]:
    """Yield an error for each section with keys by which Megatron may build or run another model."""
    for section, harmless in {"override_transformer_config": _HARMLESS, "override_ddp_config": _HARMLESS_DDP}.items():
        given = [(select(f"{role}.megatron.{section}") or {}).items() for role in (ACTOR, REF)]
        others = [(key, value) for key, value in itertools.chain(*given) if key not in harmless and value is not None]
        found = {str(key): value for key, value in others if not (key in _LOSSES and _LOSSES[key](value))}
        if found:
            what, words = f"{named(f'{MEGATRON}.{section}')} with exact mode", ", ".join(f"{k}={v!r}" for k, v in found.items())
            required, fix = "keys that exact mode knows to change no bit", f"remove {' and '.join(found)}, or set strategy=fsdp2"
            yield ConfigError(explain(what, required=required, found=words, fix=fix))


def _ranks(select: Select) -> Iterator[JetrlError]:
    """Yield an error if the trainer splits the rows of a layer's input in more parts than the rollout adds."""
    rollout = whole(select, f"{ROLLOUT}.tensor_model_parallel_size")
    for role in (ACTOR, REF):
        path = f"{role}.megatron.tensor_model_parallel_size"
        size = whole(select, path)
        if rollout % size:
            required = f"a divisor of {ROLLOUT}.tensor_model_parallel_size={rollout}, whose sums the trainer forms"
            fix = f"set it to a divisor, or set the rollout's to a multiple of {size}"
            yield ConfigError(explain(f"{named(path)} with exact mode", required=required, found=str(size), fix=fix))
            return


def _missing(te: bool, vanilla: bool) -> VersionError | None:
    """Return one error for all packages that are missing or too old."""
    bridge = "mbridge" if vanilla and not te else "megatron.bridge"
    wrong = [f"no {name}" for name in ("megatron.core", bridge) if not is_installed(name)]
    required, core = f"{MEGATRON_CORE} and {bridge.replace('.', '-')}", installed_version("megatron-core")
    if not te and core is not None and not Requirement(MEGATRON_CORE).specifier.contains(core, prereleases=True):
        wrong.append(f"megatron-core {core}")
    if te:
        required = f"megatron-core, megatron-bridge and transformer_engine>={TE_LEAST}"
        found = installed_version("transformer_engine")
        if found is None or Version(found) < Version(TE_LEAST):
            wrong.append("no transformer_engine" if found is None else f"transformer_engine {found}")
    if not wrong:
        return None
    fix = "install them where verl runs, or set strategy=fsdp2"
    return VersionError(explain("verl's Megatron engine in FP8", required=required, found=", ".join(wrong), fix=fix))


def wanted(select: Select, config: Config) -> dict[str, Any]:
    """Return the verl settings that FP8 training needs: path -> value."""
    if not config.fp8_train:
        return {}
    packed = f"{MODEL}.use_remove_padding"  # verl supports FP8 only with packed sequences, and exact attention takes no others
    values: dict[str, Any] = {packed: True}
    own = {"fp8": "e4m3", "fp8_recipe": "blockwise"} if uses_te(config) else dict.fromkeys(NEEDS_TE, False)
    for path in (ACTOR, REF):  # the reference inherits the actor's unless the user overrides them
        if select(f"{path}.megatron") is not None:
            values |= {f"{path}.megatron.override_transformer_config.{key}": value for key, value in own.items()}
    return values


class Sizes(NamedTuple):
    """How the trainer splits a model.

    Attributes:
        tp, cp, ep, expert_tp: tensor, context, expert and expert-tensor parallel size.
        scattered: whether tensor-parallel ranks share a sequence (Megatron's sequence parallelism).
        old_bridge: whether mbridge exports it.
    """

    tp: int
    cp: int
    ep: int
    expert_tp: int
    scattered: bool
    old_bridge: bool

    @classmethod
    def of(cls, get: Callable[[str], Any]) -> Sizes:
        """``get`` reads a setting of an engine's section ``megatron``."""
        tp, cp, ep = (int(get(f"{kind}_parallel_size") or 1) for kind in ("tensor_model", "context", "expert_model"))
        expert_tp = int(get("expert_tensor_parallel_size") or tp)
        return cls(tp, cp, ep, expert_tp, bool(get("sequence_parallel")), bool(get("vanilla_mbridge")))


def check_model(hf_config: Any, sizes: Sizes, config: Config) -> None:
    """Check that the 128x128 blocks of Megatron's merged matrices are those of the rollout's layers, if the trainer has such.

    ``linear_qkv`` interleaves the heads of q, k and v. ``linear_fc1`` stacks gate on up, on each rank. Raises ModelError if the
    family is unsupported, if a block would contain rows of two layers (the error names all such widths), if exact mode's
    ranks, among which context parallelism exchanges heads, would share a key head, or if they would not hold whole experts.
    """
    if getattr(hf_config, "model_type", None) not in covering("megatron"):
        required, found = f"one of {', '.join(covering('megatron'))}", uncovered(hf_config, "megatron")
        raise ModelError(explain("the model with Megatron", required=required, found=found, fix="set strategy=fsdp2"))
    mixture = expert_sizes(hf_config)
    if mixture and not config.exact:
        required = "align='exact', whose experts are the plugin's"
        fix = f"set precision={WITH_TE['precision']!r} and align='exact', or strategy=fsdp2"
        found = f"precision={config.precision!r}, align={config.resolved_align!r}"
        raise ModelError(explain("a mixture of experts in Megatron", required=required, found=found, fix=fix))
    if not config.fp8_train:
        return
    wrong = list(_cut_widths(hf_config, sizes.tp, config.exact))
    if wrong:
        required = "heads and an MLP width in multiples of 128 rows per rank, so that no FP8 block spans two layers or two ranks"
        fix = "change megatron.tensor_model_parallel_size, or set strategy=fsdp2"
        raise ModelError(explain("the model with Megatron", required=required, found=", ".join(wrong), fix=fix))
    if mixture:
        _check_mixture(mixture[0], sizes)
    latent = has_latent_attention(hf_config)  # its one key head is on every rank
    if latent and sizes.old_bridge:
        fix = "set megatron.vanilla_mbridge=false, or strategy=fsdp2"
        raise ModelError(explain("latent attention in Megatron", required="Megatron-Bridge", found="mbridge", fix=fix))
    shared = int(hf_config.num_attention_heads) if latent else key_heads(hf_config)
    ranks = sizes.tp * sizes.cp
    if config.exact and shared % ranks:
        kind = "heads" if latent else "key heads"
        required, found = f"whole {kind} on each rank", f"{shared} {kind} over {ranks} ranks"
        fix = f"let tensor_model_parallel_size times context_parallel_size divide {shared}"
        raise ModelError(explain("the model with Megatron", required=required, found=found, fix=fix))


def _cut_widths(hf_config: Any, tp: int, exact: bool) -> Iterator[str]:
    """Yield each width of a matrix, or of a tensor-parallel rank's part of it, that ends inside an FP8 block.

    Exact mode's ``linear_qkv`` has the checkpoint's blocks whatever a head's width; TransformerEngine's has Megatron's order.
    """
    heads, mixture = int(hf_config.num_attention_heads), expert_sizes(hf_config)
    if has_latent_attention(hf_config):  # a matrix each for queries and for values, so that only ranks can cut a block
        widths = (int(hf_config.qk_nope_head_dim) + int(hf_config.qk_rope_head_dim), int(hf_config.v_head_dim))
        yield from (f"{heads} heads of {width} over {tp} ranks" for width in widths if tp > 1 and heads * width % (128 * tp))
    elif (head := int(getattr(hf_config, "head_dim", None) or hf_config.hidden_size // heads)) % 128:
        counts = {"heads": heads, "key heads": key_heads(hf_config)}
        cut = [f"{count} {kind} of {head} over {tp} ranks" for kind, count in counts.items() if count * head % (128 * tp)]
        yield from cut if exact else [f"head_dim={head}"]
    all_mixtures = mixture is not None and not getattr(hf_config, "first_k_dense_replace", None)
    dense = 0 if all_mixtures else int(hf_config.intermediate_size)
    if dense % (128 * tp):
        yield f"intermediate_size={dense} over {tp} ranks"
    experts = mixture[1] if mixture else 0
    if experts % 128:
        yield f"moe_intermediate_size={experts}"
    if experts * (number := int(getattr(hf_config, "n_shared_experts", None) or 0)) % (128 * tp):
        yield f"{number} shared experts of {experts} over {tp} ranks"


def _check_mixture(experts: int, sizes: Sizes) -> None:
    what = "a mixture of experts in Megatron"
    if sizes.expert_tp > 1:
        found, fix = str(sizes.expert_tp), "set megatron.expert_tensor_parallel_size=1"
        raise ModelError(explain(what, required="whole experts on each rank", found=f"{found} ranks for each", fix=fix))
    if experts % sizes.ep:
        required, fix = f"a divisor of its {experts} experts", "change megatron.expert_model_parallel_size"
        raise ModelError(explain(what, required=required, found=f"{sizes.ep} expert-parallel ranks", fix=fix))
    if sizes.tp > 1 and not sizes.scattered:
        required, fix = "tensor-parallel ranks with tokens of their own", "set megatron.sequence_parallel=true"
        raise ModelError(explain(what, required=required, found="the same tokens on each", fix=fix))
    if sizes.tp > 1 and sizes.old_bridge:  # which gathers experts over the tensor-parallel ranks, each of which holds them whole
        required, fix = "Megatron-Bridge, or one tensor-parallel rank", "set megatron.vanilla_mbridge=false"
        raise ModelError(explain(what, required=required, found=f"mbridge with {sizes.tp} ranks", fix=fix))


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
