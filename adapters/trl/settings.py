"""Which arguments of TRL's trainers, and settings of their configurations, a mode does not support."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jetrl_patch import registry
from jetrl_patch.adapters.trl import compat, correction, support
from jetrl_patch.adapters.trl.state import TRAINERS, kind_of
from jetrl_patch.config import Config
from jetrl_patch.errors import UNQUANTIZED, ConfigError, ConflictError, JetrlError, ModelError, explain
from jetrl_patch.models.structure import is_vision_language
from jetrl_patch.trainer import support as trainer_support
from jetrl_patch.trainer.foreign import PACKAGES
from jetrl_patch.trainer.preflight import checkpoint_problems, model_problems, say_share
from jetrl_patch.trainer.rules import (
    Rule,
    adapter_problems,
    broken,
    deterministic,
    is_set,
    kv_cache_problems,
    other_than,
    raised,
    temperature,
)

_LOGITS = "the distribution that the trainer computes"
_UNTESTED = "(others have not run with TRL)"
#: of ``model_init_kwargs``: where the model comes from, and what the plugin sets itself
LOADING = frozenset({"attn_implementation", "cache_dir", "dtype", "local_files_only", "revision", "token", "trust_remote_code"})


def _loads_otherwise(value: Any) -> bool:
    return bool(set(value) - LOADING) or (str(value.get("dtype")).endswith("float16") and "bfloat16" not in str(value["dtype"]))


def _is_divided_otherwise(value: Any) -> bool:
    return value != 1 and compat.divides_by_temperature()


def _changes_weights(settings: Mapping[str, Any]) -> bool:
    """Whether DeepSpeed would compute with other weights than the plugin's layers."""
    unsupported = ("compile", "compression_training", "quantize_training", "tensor_parallel")
    quantizes = settings.get("zero_optimization", {}).get("zero_quantized_weights")
    return bool(quantizes or any(settings.get(name) for name in unsupported))


#: paths are those of accelerate's state, which GRPOConfig, a configuration file and variables decide together
ACCELERATOR: tuple[Rule, ...] = (
    Rule("mixed_precision", other_than("no", "bf16"), "bf16 or no", "set bf16=True", "quantized", ConflictError),
    Rule("parallelism_config", is_set, "whole sequences and whole layers on each rank", "unset it", "quantized"),
    Rule("torch_tp_plugin", is_set, "whole layers on each rank", "turn it off", "quantized"),
    Rule("megatron_lm_plugin", is_set, "models of transformers", "turn it off", "quantized"),
    Rule("dynamo_plugin", lambda value: value.backend.value != "NO", "uncompiled layers", "set torch_compile=False", "quantized"),
    Rule("deepspeed_plugin", lambda value: _changes_weights(value.deepspeed_config),
         "a configuration that neither quantizes, compiles nor splits weights", "drop its key", "quantized"),
)  # fmt: skip


#: paths are those of ``GRPOConfig`` and ``RLOOConfig``, or of a trainer's argument behind "trainer."
RULES: tuple[Rule, ...] = (
    Rule("use_vllm", other_than(True), "True, a rollout by vLLM", "set it to True", "changed"),
    Rule("vllm_model_impl", other_than("vllm"), "'vllm'", "set it to 'vllm'", "quantized"),
    Rule("model_init_kwargs", _loads_otherwise, f"none but {', '.join(sorted(LOADING))}, and no FP16", "drop the others",
         "quantized"),
    Rule("fp16_full_eval", is_set, "the weights of the training", "set it to False", "changed"),
    Rule("bf16_full_eval", is_set, "the weights of the training", "set it to False", "changed"),
    Rule("torch_compile", is_set, "uncompiled layers", "set it to False", "quantized"),
    Rule("use_liger_kernel", is_set, "exact mode's own norm, RoPE and activation", "set it to False", "exact", ConflictError),
    Rule("cast_lm_head_to_fp32", is_set, "the plugin's FP32 lm_head", "use head_dtype='float32'", "quantized", ConflictError),
    Rule("neftune_noise_alpha", is_set, "embeddings without noise, as in the rollout", "unset it", "exact"),
    Rule("sync_ref_model", is_set, f"a fixed reference model {_UNTESTED}", "set it to False", "quantized"),
    Rule("repetition_penalty", other_than(1), _LOGITS, "set it to 1.0", "exact"),
    *temperature("temperature"),
    Rule("temperature", _is_divided_otherwise, "1.0 before TRL 1.14, which divides logits otherwise than vLLM",
         "set it to 1.0, or install trl>=1.14", "exact"),
    Rule("trainer.quantization_config", is_set, "BF16 or FP32 weights", "drop it", "quantized", ConflictError),
    Rule("trainer.rollout_func", is_set, "TRL's own rollout, whose samples the plugin compares", "drop it", "quantized"),
)  # fmt: skip

_HALF = "FP16 on both sides, by autocast over FP32 weights"
#: with ``precision="fp16"``
HALF_RULES: tuple[Rule, ...] = (
    Rule("fp16", other_than(True), f"True: {_HALF}", "set it to True", "all"),
    Rule("vllm_mode", other_than("colocate"), f"'colocate' {_UNTESTED}", "set it to 'colocate'", "all"),
    Rule("model_init_kwargs", lambda value: "float32" not in str(value.get("dtype", "float32")), _HALF, "drop its dtype", "all"),
)  # fmt: skip

#: settings of the plugin: what TRL has itself, or what the plugin does not do there
OWN: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "optimizer_states": (other_than("fp32"), "use TRL's optim"),
    "fp8_all_gather": (is_set, "leave it unset"),
    "sync": (other_than("full"), "leave it unset"),
    "measure_routes": (is_set, "leave it unset"),
    "router_replay": (other_than("none"), "leave it unset"),
}


def check(arguments: Mapping[str, Any], config: Config) -> None:
    """Raise the first error about a trainer's arguments, by name."""
    for problem in problems(arguments, config):
        raise problem


def problems(arguments: Mapping[str, Any], config: Config) -> Iterator[JetrlError]:
    """Yield a ConfigError, ConflictError or ModelError for each argument or setting that the mode does not support."""
    for setting, (bad, fix) in OWN.items():
        if bad(value := getattr(config, setting)):
            yield ConfigError(explain(f"{setting} with TRL", required="no such setting", found=repr(value), fix=fix))
    yield from kv_cache_problems(config)
    args = arguments.get("args")

    def select(path: str) -> Any:
        owner, _, name = path.rpartition(".")
        return arguments.get(name) if owner else getattr(args, name, None)

    own, kind = type(arguments["self"]), kind_of(arguments["self"])
    configuration = kind.replace("Trainer", "Config")
    if args is not None:
        yield from correction.problems(args, kind, config)
        ratio = "vllm_importance_sampling_correction"
        corrected = ratio if getattr(args, ratio, False) else ""
        needs = support.lacking(args)
        named = support.names_of(args, configuration)
        yield from registry.rollout().parameter_problems(args.generation_kwargs or {}, config, named)
        yield from trainer_support.problems(support.select_of(args), config, named, needs, corrected)
    if args is None and config.quantized_rollout:
        required, fix = f"a {configuration} with use_vllm=True", "pass one as args"
        yield ConfigError(explain(kind, required=required, found="none", fix=fix))

    def name(path: str) -> str:
        owner, _, last = path.rpartition(".")
        return f"{kind}'s {last}" if owner else f"{configuration}'s {last}"

    rules = HALF_RULES if config.mode.scales_loss else ()
    yield from broken(RULES + rules + deterministic(config, "full_determinism"), select, config, name)
    if config.mode.scales_loss and not str(dtype := getattr(arguments.get("model"), "dtype", "float32")).endswith("float32"):
        what, fix = f"{kind}'s model with precision={config.precision!r}", "load it in FP32, or pass its name"
        yield ConfigError(explain(what, required=_HALF, found=f"one in {dtype}", fix=fix))
    if config.changes_rollout and args is not None:
        theirs = own.__module__.partition(".")[0] in PACKAGES and own.__module__ not in TRAINERS
        if theirs or "unsloth" in sys.modules:  # which replaces TRL's classes by its own
            yield unsupported(f"{own.__module__}.{own.__qualname__}", config)
    if config.quantized_rollout and args is not None:
        if arguments.get("peft_config") is not None:
            yield from adapter_problems(config, "peft_config")
        yield from _of_model(arguments, config, kind)


def _of_model(arguments: Mapping[str, Any], config: Config, kind: str) -> Iterator[JetrlError]:
    from transformers.integrations import is_deepspeed_zero3_enabled

    model: Any = arguments.get("model")
    args, tools = arguments["args"], tools_of(arguments)
    tp = args.vllm_tensor_parallel_size
    if hasattr(model, "peft_config"):
        required, fix = "a model without adapters", "pass it as it was before, and peft_config"
        yield ConfigError(explain(f"{kind}'s model", required=required, found="a model of peft's", fix=fix))
    if is_deepspeed_zero3_enabled():  # transformers builds no model without its weights then: their conversion checks them
        return
    if not isinstance(model, str):
        yield from raised(lambda: check_model(model.config, args, tools, config))
        yield from model_problems(model.config, config, tp)
        return
    hf_config = yield from checkpoint_problems(model, config, tp, trust_remote_code=args.trust_remote_code)
    if hf_config is not None:
        yield from raised(lambda: check_model(hf_config, args, tools, config))
        say_share(model, config, tp)


def check_accelerator(accelerator: Any, config: Config, adapted: bool) -> None:
    """Raise the first error about how accelerate would wrap a model. ``adapted``: whether it has adapters."""
    for problem in broken(ACCELERATOR, lambda name: getattr(accelerator.state, name, None), config, "accelerate's {}".format):
        raise problem
    if (plugin := getattr(accelerator.state, "fsdp_plugin", None)) is None or not config.quantized_rollout:
        return
    from torch.distributed.fsdp import CPUOffloadPolicy

    found = {
        "version=1": plugin.fsdp_version != 2,
        "cpu_offload": isinstance(plugin.cpu_offload, CPUOffloadPolicy),
        "ignored_modules": plugin.ignored_modules,
        "activation_checkpointing with LoRA": adapted and plugin.activation_checkpointing,
    }
    if words := [word for word, there in found.items() if there]:
        required, fix = f"FSDP2 on GPUs, with gradient_checkpointing for LoRA {_UNTESTED}", "change or drop these"
        raise ConfigError(explain("fsdp_config with TRL", required=required, found=", ".join(words), fix=fix))


def tools_of(arguments: Mapping[str, Any]) -> list[str]:
    """The names of a trainer's arguments by which it has tools."""
    return [name for name in ("tools", "environment_factory") if arguments.get(name)]


def check_loaded(model: Any, args: Any, tools: Sequence[str], config: Config) -> None:
    """Raise the first error about a loaded model."""
    devices = sorted({str(device) for device in (getattr(model, "hf_device_map", None) or {}).values()})
    if len(devices) > 1:
        required, fix = "one on one device", "start one process for each GPU with `accelerate launch`"
        raise ConfigError(explain("the trainer's model", required=required, found=f"one on {', '.join(devices)}", fix=fix))
    if getattr(model, "use_kernels", False):
        required, fix = "the layers of transformers", "load the model without use_kernels"
        raise ConflictError(explain("the trainer's model", required=required, found="kernels from a hub", fix=fix))
    check_model(model.config, args, tools, config)


def check_model(hf_config: Any, args: Any, tools: Sequence[str], config: Config) -> None:
    """Raise ModelError for a model that a quantized rollout does not support in TRL, with these settings and tools."""
    if config.exact and (scale := getattr(hf_config, "logits_scaling", 1.0)) != 1.0:
        required, found = "logits that lm_head alone computes", f"logits_scaling={scale}"
        raise ModelError(explain("align='exact' in TRL", required=required, found=found, fix="use align='linear'"))
    if is_vision_language(hf_config):
        server = [] if args.vllm_mode == "colocate" else ["vllm_mode='server'"]
        if found := ", ".join([*server, *tools]):
            what = f"model_type={hf_config.model_type!r} with TRL and a quantized rollout"
            required, fix = f"vllm_mode='colocate' without tools {_UNTESTED}", f"drop the others, or use {UNQUANTIZED}"
            raise ModelError(explain(what, required=required, found=found, fix=fix))


def unsupported(trainer: str, config: Config) -> ConfigError:
    """The error for a trainer of TRL that the plugin does not know."""
    what, fix = f"{trainer} with precision={config.precision!r}", "use one of these, or run this program without jetrl_patch"
    required = " or ".join(f"trl.{kind}" for kind in TRAINERS.values())
    return ConfigError(explain(what, required=required, found="another trainer", fix=f"{fix} (JETRL_ENABLED=0)"))

