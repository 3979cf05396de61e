"""Check and complete OpenRLHF's arguments before any actor starts, so the user need not edit them."""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import PurePath
from typing import Any

from jetrl_patch import registry, session
from jetrl_patch._versions import PROGRAMS
from jetrl_patch.adapters.openrlhf import checkpoint, correction, startup, vision
from jetrl_patch.adapters.openrlhf.state import START, WORKER
from jetrl_patch.config import Config
from jetrl_patch.errors import UNQUANTIZED, ConfigError, ConflictError, JetrlError, ModelError, SyncError, explain
from jetrl_patch.models.structure import expert_sizes, is_vision_language, require_attention
from jetrl_patch.patching.patch import replacement
from jetrl_patch.trainer import rules, support
from jetrl_patch.trainer.precision import at_smallest, scales_loss
from jetrl_patch.trainer.preflight import checkpoint_problems, cut_note, say_share
from jetrl_patch.trainer.rules import (
    MARK,
    OPTIMIZER_MODULE,
    OPTIMIZERS,
    Rule,
    adapter_problems,
    broken,
    check_torchao,
    deterministic,
    is_set,
    kv_cache_problems,
    more_than_one,
    other_than,
    positive,
    raised,
    route_setting,
    temperature,
)

# ---- Optimizer states: pass DeepSpeed an optimizer where OpenRLHF passes a name ------------------
# ZeRO flattens parameters before the optimizer sees them, and keeps no state itself. So stages 1 to 3 work: the optimizer holds
# states for its rank's flat partition. Stage 0 trains, but cannot load its own checkpoint.

_STATES = "adam, whose states optimizer_states selects"

#: AdamW's own options; others ("torch_adam") select one of DeepSpeed's classes
_OPTIONS = ("lr", "betas", "eps", "weight_decay")

#: with ``optimizer_states`` other than 'fp32'
OPTIMIZER_RULES: tuple[Rule, ...] = (
    Rule("actor.optim", other_than("adam"), _STATES, "set it to adam, or leave optimizer_states at 'fp32'", "all"),
    Rule("critic.optim", other_than("adam"), _STATES, "set it to adam, or leave optimizer_states at 'fp32'", "all"),
    Rule("ds.zero_stage", other_than(1, 2, 3), "1, 2 or 3 (at 0 DeepSpeed cannot load these states)", "set it to 2", "all"),
    Rule("ds.adam_offload", is_set, "optimizer states on the device", "remove the flag", "all"),
    Rule("ds.use_universal_ckpt", is_set, "DeepSpeed's own checkpoint format", "remove the flag", "all"),
)


@replacement
def initialize(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap ``deepspeed.initialize``: replace the configuration's AdamW by the plugin's, with the same options.

    Engines without an optimizer (reference model) or with their own are unchanged.
    """
    bound, states = inspect.signature(original).bind(*args, **kwargs), session.active_config().optimizer_states
    config: Any = bound.arguments.get("config")
    named = config.get("optimizer") if isinstance(config, dict) else None
    if states == "fp32" or not named or named.get("type") != "AdamW" or bound.arguments.get("optimizer") is not None:
        return original(*args, **kwargs)
    options = {name: value for name, value in named["params"].items() if name in _OPTIONS}

    def make(parameters: Any) -> Any:  # DeepSpeed calls it with the grouped parameters
        return getattr(importlib.import_module(OPTIMIZER_MODULE), OPTIMIZERS[states])(parameters, **options)

    bound.arguments["optimizer"] = make
    rest = {name: value for name, value in config.items() if name != "optimizer"}
    bound.arguments["config"] = rest | {"zero_allow_untested_optimizer": True}
    return original(*bound.args, **bound.kwargs)


# ---- ``precision="fp16"``, ``kv_cache`` and ``head_dtype`` ---------------------------------------
# OpenRLHF's ``--ds.param_dtype fp16`` loads all models in FP16 and enables DeepSpeed's mixed precision: FP32 masters, and a loss
# scale that starts at 2^16, doubles after 1000 good steps and halves at every overflow but the first. OpenRLHF hard-codes BF16
# for its vLLM engines; the vLLM adapter sets them to FP16. This module raises on values that do not fit FP16, counts skipped
# steps, and stops a run that skips all steps.

_WHOLE = "whole sequences on each rank (the trainer finds the first tokens of responses in them)"

PRECISION_RULES: tuple[Rule, ...] = (
    Rule("ds.ring_attn_size", more_than_one, _WHOLE, "set it to 1", "all"),
    Rule("ds.load_in_4bit", is_set, "weights in FP16", "remove the flag", "all"),
    Rule("ds.tensor_parallel_size", more_than_one, "1 (OpenRLHF's tensor parallelism supports only BF16)", "set it to 1", "all"),
)

HEAD_RULES: tuple[Rule, ...] = (
    Rule("ds.tensor_parallel_size", more_than_one, "a whole lm_head on each rank", "set it to 1", "all"),
    Rule("ds.use_liger_kernel", is_set, "logits from lm_head's forward", "remove the flag", "all"),
)


def precision_problems(select: Callable[[str], Any], config: Config) -> Iterator[JetrlError]:
    """Yield an error for each argument that conflicts with these three settings."""
    if config.mode.scales_loss:
        yield from broken(PRECISION_RULES, select, config, argument)
    elif config.mode.only_measures and select("ds.param_dtype") == "fp16":
        fix = "set precision='fp16' (JETRL_PRECISION=fp16), which uses FP16 on both sides"
        what = "OpenRLHF's --ds.param_dtype with precision='bf16'"
        required = "bf16, because OpenRLHF's vLLM engines stay in BF16"
        yield ConfigError(explain(what, required=required, found="'fp16'", fix=fix))
    if config.fp32_head:
        yield from broken(HEAD_RULES, select, config, argument)
    yield from kv_cache_problems(config)


def _pieces(module: Any) -> Iterator[tuple[str, Any]]:
    """Yield each parameter, or this rank's partition of it under ZeRO-3."""
    for name, parameter in module.named_parameters():
        yield name, getattr(parameter, "ds_tensor", parameter)


def check_model(module: Any, path: str) -> None:
    """Raise ModelError if the checkpoint does not fit FP16. It was loaded in FP16, so values that are too large are Inf."""
    if not scales_loss():
        return
    from jetrl_patch.sync.send import check_fits

    check_fits(_pieces(module), f"the checkpoint {path}")


def check_weights(module: Any) -> None:
    """Check before a weight sync, on every rank, that all weights are finite in FP16.

    Raises SyncError on all ranks, so none hangs in a collective. Each rank names its own weights.
    """
    if not scales_loss():
        return
    import torch
    import torch.distributed as dist

    from jetrl_patch.sync.send import misfit

    found = [f"{name} has {why}" for name, weight in _pieces(module) if (why := misfit(weight))]
    anywhere = torch.tensor([len(found)], device=next(module.parameters()).device)
    dist.all_reduce(anywhere)
    if int(anywhere):
        rest = f" and {len(found) - 3} more" if len(found) > 3 else ""
        raise SyncError(
            f"the weights do not fit FP16, so nothing was synced: {'; '.join(found[:3]) or 'another rank names them'}{rest}. "
            "Check the last optimizer steps (gradient norm, learning rate), or use precision='bf16'."
        )


@replacement
def optimizer_step(original: Any, self: Any, _optimizer: Any, model: Any, _scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap ``DeepspeedStrategy.optimizer_step``: count skipped steps.

    Calls within gradient accumulation are not steps. Raises PrecisionError once every step is skipped.
    """
    if not scales_loss():
        return original(self, _optimizer, model, _scheduler, *args, **kwargs)
    engine = model if hasattr(model, "skipped_steps") else model.model  # an Actor holds its engine
    steps, skipped = engine.global_steps, engine.skipped_steps
    try:
        result = original(self, _optimizer, model, _scheduler, *args, **kwargs)
    except Exception as error:  # DeepSpeed raises a bare Exception there
        if "loss scale already at minimum" in str(error):
            raise at_smallest(WORKER.loss_scale.in_a_row + 1) from error
        raise
    if engine.global_steps > steps:
        WORKER.loss_scale.note(skipped=engine.skipped_steps > skipped, scale=float(engine.optimizer.loss_scale))
    return result


# ---- LoRA of the policy: ``model`` builds it, and ``sync`` sends it ------------------------------
# OpenRLHF 0.11 adds adapters to the policy and the critic, but its own sync sends peft's names, which vLLM rejects. With a
# quantized rollout the plugin sends merged weights (``fp8.lora``) under the names of the plain model. The reference model is a
# model of its own, without adapters.

_RANK = "ds.lora.rank"

#: checked only with adapters
LORA_RULES: tuple[Rule, ...] = (
    Rule("ds.lora.dropout", is_set, "0 (the rollout has no dropout)", "set it to 0", "quantized"),
    Rule("train.enable_ema", is_set, "no average of the weights (OpenRLHF's has no adapters)", "remove the flag", "quantized"),
)


def lora_problems(select: Callable[[str], Any], config: Config) -> Iterator[JetrlError]:
    """Yield an error for each setting that is unsupported with adapters."""
    if not positive(select(_RANK) or 0):
        return
    if not config.quantized_rollout:
        required = "full weights, because OpenRLHF's own sync sends adapters under names that vLLM does not know"
        fix = "set it to 0, or use a quantized rollout"
        yield ConflictError(explain(f"{argument(_RANK)} with precision={config.precision!r}", required=required,
                                    found=repr(select(_RANK)), fix=fix))  # fmt: skip
    yield from broken(LORA_RULES, select, config, argument)
    yield from adapter_problems(config, argument(_RANK))


def lora_model_problems(select: Callable[[str], Any], hf_config: Any, config: Config) -> Iterator[JetrlError]:
    """Yield an error for adapters of a model with which they have not run."""
    untested = is_vision_language(hf_config) or expert_sizes(hf_config) is not None
    if config.quantized_rollout and positive(select(_RANK) or 0) and untested:
        what, required = "LoRA in OpenRLHF with a quantized rollout", "a dense text model (others have not run)"
        found, fix = f"model_type={hf_config.model_type!r}", f"remove --{_RANK}, or use {UNQUANTIZED}"
        yield ModelError(explain(what, required=required, found=found, fix=fix))


# ---- Check and complete the arguments ------------------------------------------------------------

logger = logging.getLogger(__name__)

_LIGER = "exact mode's own norm, RoPE and activation"
_REMOVE = "remove the flag"

RULES: tuple[Rule, ...] = (
    Rule("vllm.num_engines", lambda n: not n, "at least one vLLM engine", "set it to 1 or more", "all", absent=True),
    Rule("ds.load_in_4bit", is_set, "no quantization but jetrl_patch's", _REMOVE, "quantized", ConflictError),
    Rule("ds.tensor_parallel_size", more_than_one, "whole layers on each rank", "set it to 1", "quantized"),
    Rule("ds.param_dtype", other_than("bf16"), "bf16", "set it to bf16", "quantized"),
    Rule("ds.deepcompile", is_set, "uncompiled layers", _REMOVE, "quantized"),
    Rule("ds.ring_attn_size", more_than_one, "whole sequences on each rank", "set it to 1", "exact"),
    Rule("ds.use_liger_kernel", is_set, _LIGER, _REMOVE, "exact", ConflictError),
    *temperature("rollout.temperature"),
)


def check(args: Any, config: Config) -> None:
    """Raise the first error of ``problems``."""
    for problem in problems(args, config):
        raise problem


def problems(args: Any, config: Config) -> Iterator[JetrlError]:
    """Yield a ConfigError, ConflictError or ModelError for each argument that the mode does not support.

    ``args`` is OpenRLHF's nested namespace (``openrlhf.utils.config.hierarchize``).
    """
    if _get(args, "vllm") is None or _get(args, "rollout") is None:
        yield _without_rollout("OpenRLHF")
        return
    if config.fp8_all_gather:
        trains = "OpenRLHF, which trains with DeepSpeed"
        yield ConfigError(explain("fp8_all_gather=True", required="FSDP2", found=trains, fix="set fp8_all_gather=False"))
    if config.returns_routes:
        required, runs = "verl, whose samples contain the rollout's routes", "OpenRLHF, whose samples do not"
        yield ConfigError(explain(route_setting(config), required=required, found=runs, fix="turn routes off"))
    yield from startup.abandoned()
    rules, select = RULES + deterministic(config, "train.full_determinism_enable"), functools.partial(_get, args)
    if config.optimizer_states != "fp32":
        yield from raised(lambda: check_torchao(config.optimizer_states))
        rules += OPTIMIZER_RULES
    if registry.platform().is_cpu_run(config):
        rules += (Rule("vllm.enable_sleep", is_set, "a GPU: vLLM has no sleep mode on a CPU", "remove the flag", "all"),)
    yield from broken(rules, select, config, argument)
    yield from support_problems(args, config)
    yield from model_name_problems(args)
    yield from reward_problems(args)
    yield from precision_problems(select, config)
    yield from lora_problems(select, config)
    yield from correction.problems(args, config)
    yield from checkpoint.problems(select, config)
    # trust_remote_code, as OpenRLHF loads every model
    hf_config = yield from checkpoint_problems(*_checkpoint(args, config), trust_remote_code=True)
    if hf_config is not None:
        yield from model_problems(args, hf_config, config)


def sampling_of(args: Any) -> support.Select:
    """Return the arguments of the rollout, by vLLM's names. ``top_p`` is OpenRLHF's only one beside the temperature."""
    return lambda name: _get(args, f"rollout.{name}")


def support_problems(args: Any, config: Config) -> Iterator[JetrlError]:
    """Yield an error for such arguments where the trainer would have to compute their distribution."""
    level = "algo.advantage.is_correction_level"
    corrects = config.correction != "none" or _get(args, level) not in (None, "off")
    corrected = f"--{level}" if corrects else ""
    yield from support.problems(sampling_of(args), config, lambda name: argument(f"rollout.{name}"), {}, corrected)


def model_name_problems(args: Any) -> Iterator[JetrlError]:
    """Yield an error if there is no model to train. OpenRLHF would start Ray and its engines before it looks for one."""
    if not _get(args, "actor.model_name_or_path"):
        required, fix = "a model to train", "add --actor.model_name_or_path with a folder or a name on the hub"
        yield ConfigError(explain("OpenRLHF's --actor.model_name_or_path", required=required, found="none", fix=fix))


def reward_problems(args: Any) -> Iterator[JetrlError]:
    """Yield an error if nothing scores the samples. OpenRLHF would start its actors anyway, or end in a traceback."""
    sources = ("reward.remote_url", "reward.model_name_or_path", "train.agent_func_path")
    if not any(_get(args, path) for path in sources):
        required = "a reward: a file or a server (--reward.remote_url), a model, or an agent (--train.agent_func_path)"
        fix = "add --reward.remote_url FILE.py with a reward_func(queries, prompts, labels)"
        yield ConfigError(explain("OpenRLHF's arguments", required=required, found="none", fix=fix))


def model_problems(args: Any, hf_config: Any, config: Config) -> Iterator[JetrlError]:
    """Yield an error for a model that a quantized rollout does not support in OpenRLHF, or with these arguments."""
    what = "the model with OpenRLHF and a quantized rollout"
    if not is_vision_language(hf_config):
        yield from raised(lambda: require_attention(hf_config, what, f"use {UNQUANTIZED}"))
    elif expert_sizes(hf_config) is not None:
        required, fix = "no experts with a vision tower (an untested combination)", f"use a dense model, or {UNQUANTIZED}"
        yield ModelError(explain(what, required=required, found=f"model_type={hf_config.model_type!r}", fix=fix))
    select = functools.partial(_get, args)
    yield from vision.problems(select, hf_config, config)
    yield from lora_model_problems(select, hf_config, config)


def _checkpoint(args: Any, config: Config) -> tuple[Any, Config, int]:
    """Return the model's folder, the settings, and the rollout's tensor-parallel size."""
    return _get(args, "actor.model_name_or_path"), config, int(_get(args, "vllm.tensor_parallel_size") or 1)


def chosen(args: Any, asked: Config) -> Config:
    """Return the plugin's settings unchanged: OpenRLHF has one training engine."""
    return asked


def complete(args: Any, config: Config) -> list[str]:
    """Set what the mode needs in the arguments; return a description of each change."""
    changes = cut_note(*_checkpoint(args, config))
    if config.mode.scales_loss and args.ds.param_dtype != "fp16":
        args.ds.param_dtype = "fp16"
        changes.insert(0, "--ds.param_dtype fp16: precision='fp16' uses FP16 on both sides")
    for name, value in correction.wanted(config).items():
        if getattr(args.algo.advantage, name) != value:
            setattr(args.algo.advantage, name, value)
            changes.append(f"--algo.advantage.{name} {value}: correction={config.correction!r}")
    eager = (config.exact or config.guard_sqnr is not None) and not config.may_capture
    if eager and not _get(args, "vllm.enforce_eager"):
        args.vllm.enforce_eager = True
        why = "fuses ops and rounds differently" if config.exact else "would keep running layers that have left FP8"
        changes.append(f"--vllm.enforce_eager: a compiled graph {why}")
    if config.exact and _get(args, "train.async_enable"):
        changes.append(
            "asynchronous rollouts may use older weights than the trainer's: exact mode covers only samples of the trainer's "
            "current weights, and jetrl/stale_fraction reports the share of the others"
        )
    return changes


#: OpenRLHF's main module for training with a rollout
PROGRAM = PROGRAMS["openrlhf"]


def program_problem(target: str) -> JetrlError | None:
    """Return the error for a training program of OpenRLHF without a rollout; None for any other program."""
    module = ".".join(PurePath(target).with_suffix("").parts) if target.endswith(".py") else target
    trains = re.search(r"(^|\.)openrlhf\.cli\.train_\w+$", module)
    if trains is None or module.endswith(PROGRAM):
        return None
    return _without_rollout(trains[0].lstrip("."))


def _without_rollout(where: str) -> ConfigError:
    required, found = f"{PROGRAM}, which has a rollout", "training without a rollout (SFT, reward model, DPO)"
    return ConfigError(explain(f"jetrl_patch in {where}", required=required, found=found, fix="start it without jetrl_patch"))


def check_mark(args: Any, where: str) -> None:
    """Compare this process's settings with those that the driver stored in the arguments."""
    unpatched = f"OpenRLHF's driver is not patched, but {where} is. {START}"
    rules.check(getattr(args, MARK, None), session.active_config(), where, unpatched)


@replacement
def get_strategy(original: Any, args: Any) -> Any:
    """Wrap ``openrlhf.utils.get_strategy``, which the driver calls first with its arguments."""
    config = session.active_config()
    check(args, config)
    say_share(*_checkpoint(args, config))
    for change in complete(args, config):
        logger.warning("jetrl_patch: %s", change)
    setattr(args, MARK, config.to_env())
    return original(args)


def argument(path: str) -> str:
    """Name the argument at ``path`` in an error."""
    return f"OpenRLHF's --{path}"


def _get(args: Any, path: str) -> Any:
    for part in path.split("."):
        args = getattr(args, part, None)
    return args
