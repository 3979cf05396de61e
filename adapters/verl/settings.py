"""verl's configuration, checked and completed before anything starts, so that the user changes nothing in it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from jetrl_patch import runtime
from jetrl_patch.adapters.verl.section import disagreement
from jetrl_patch.config import Config
from jetrl_patch.errors import ConfigError, ConflictError, JetrlError, explain

logger = logging.getLogger(__name__)

#: key under ``actor_rollout_ref.rollout.custom`` and in reports that says: this side is patched
MARK = "jetrl"

ACTOR = "actor_rollout_ref.actor"
REF = "actor_rollout_ref.ref"
MODEL = "actor_rollout_ref.model"
ROLLOUT = "actor_rollout_ref.rollout"
ENGINE = f"{ROLLOUT}.engine_kwargs.vllm"


@dataclass(frozen=True)
class Rule:
    """One setting of verl that cannot stand beside ours.

    Attributes:
        path: where in verl's configuration.
        bad: whether a value is refused; ``None`` (absent) never is.
        asked: what we need, in words.
        fix: what to do.
        scope: "all", "fp8" (FP8 in the rollout) or "exact".
        error: ConflictError where something else wants to do the same, ConfigError where we cannot do it.
    """

    path: str
    bad: Callable[[Any], bool]
    asked: str
    fix: str
    scope: str
    error: type[JetrlError] = ConfigError

    def applies(self, config: Config) -> bool:
        """Whether the rule holds in this mode."""
        return self.scope == "all" or (self.scope == "fp8" and config.fp8_rollout) or config.exact


def _set(value: Any) -> bool:
    return bool(value)


def _more_than_one(value: Any) -> bool:
    return int(value) > 1


def _positive(value: Any) -> bool:
    return int(value) > 0


def _other_than(*allowed: Any) -> Callable[[Any], bool]:
    return lambda value: value not in allowed


def _dtype_other_than_bf16(value: Any) -> bool:
    return str(value).removeprefix("torch.") not in ("bf16", "bfloat16")


_OFF = "switch it off"
_QUANTIZED = "no other quantization beside jetrl_patch"
_PARALLEL = "a trainer that holds whole sequences and a rollout of plain tensor parallelism"

RULES: tuple[Rule, ...] = (
    Rule(f"{ROLLOUT}.name", _other_than("vllm"), "vllm", "set rollout.name=vllm", "all"),
    Rule(f"{ROLLOUT}.quantization", _set, _QUANTIZED, "set it to null", "all", ConflictError),
    Rule(f"{ROLLOUT}.quantization_config_file", _set, _QUANTIZED, "set it to null", "all", ConflictError),
    Rule(f"{ROLLOUT}.qat.enable", _set, _QUANTIZED, _OFF, "all", ConflictError),
    Rule(f"{ACTOR}.fsdp_config.qat.enable", _set, _QUANTIZED, _OFF, "all", ConflictError),
    Rule(f"{ENGINE}.quantization", _other_than("jetrl_fp8"), _QUANTIZED, "leave it out", "all", ConflictError),
    Rule(f"{MODEL}.lora_rank", _positive, "full weights", "set it to 0", "fp8", ConflictError),
    Rule(f"{MODEL}.lora.rank", _positive, "full weights", "set it to 0", "fp8", ConflictError),
    Rule(f"{MODEL}.lora_adapter_path", _set, "full weights", "set it to null", "fp8", ConflictError),
    Rule(f"{ACTOR}.strategy", _other_than("fsdp", "fsdp2"), "fsdp or fsdp2", "use one of them", "fp8"),
    Rule(f"{REF}.strategy", _other_than("fsdp", "fsdp2"), "fsdp or fsdp2", "use one of them", "fp8"),
    Rule(f"{ROLLOUT}.checkpoint_engine.backend", _other_than("naive"), "naive", "use it", "fp8"),
    Rule(f"{ROLLOUT}.checkpoint_manager_class", _set, "verl's own manager", "leave it out", "all"),
    Rule(f"{ROLLOUT}.disaggregation.enabled", _set, _PARALLEL, _OFF, "fp8"),
    Rule(f"{ROLLOUT}.pipeline_model_parallel_size", _more_than_one, _PARALLEL, "set it to 1", "fp8"),
    Rule(f"{ROLLOUT}.expert_parallel_size", _more_than_one, _PARALLEL, "set it to 1", "fp8"),
    Rule(f"{ROLLOUT}.mtp.enable", _set, "no speculative decoding", _OFF, "fp8"),
    Rule(f"{ENGINE}.speculative_config", _set, "no speculative decoding", "leave it out", "fp8"),
    Rule(f"{ROLLOUT}.dtype", _dtype_other_than_bf16, "bfloat16", "set it so", "fp8"),
    Rule(f"{ACTOR}.fsdp_config.mixed_precision.param_dtype", _dtype_other_than_bf16, "bf16", "set it so", "fp8"),
    Rule(f"{ROLLOUT}.layered_summon", _set, "whole weights at sync", _OFF, "fp8"),
    Rule("reward.reward_model.enable", _set, "vLLM engines that serve the policy", "use a reward function", "fp8"),
    Rule("distillation.enabled", _set, "vLLM engines that serve the policy", _OFF, "fp8"),
    Rule(
        "algorithm.rollout_correction.bypass_mode", _set,
        "log-probs computed by the trainer, so that the mismatch can be measured", "set it to false", "all",
    ),
    Rule(f"{MODEL}.use_fused_kernels", _set, "log-probs from full logits", _OFF, "exact"),
    Rule(f"{MODEL}.use_liger", _set, "norm, RoPE and activation of exact mode", _OFF, "exact", ConflictError),
    Rule(f"{ACTOR}.ulysses_sequence_parallel_size", _more_than_one, _PARALLEL, "set it to 1", "exact"),
    Rule(f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size", _more_than_one, _PARALLEL, "set it to 1", "exact"),
    Rule(f"{ACTOR}.use_prefix_grouper", _set, "the attention of exact mode", _OFF, "exact"),
    Rule(f"{ROLLOUT}.data_parallel_size", _more_than_one, _PARALLEL, "use more replicas instead", "exact"),
    Rule(f"{ROLLOUT}.top_p", _other_than(1, 1.0), "1, which the trainer can reproduce", "set it so", "exact"),
    Rule(f"{ROLLOUT}.top_k", _other_than(-1, 0), "-1, which the trainer can reproduce", "set it so", "exact"),
    Rule(f"{ROLLOUT}.repetition_penalty", _other_than(1, 1.0), "1.0, which the trainer can reproduce", "set it so", "exact"),
    Rule(f"{ROLLOUT}.min_p", _other_than(0, 0.0), "0, which the trainer can reproduce", "set it so", "exact"),
    Rule(f"{ROLLOUT}.min_tokens", _other_than(0), "0, which the trainer can reproduce", "set it so", "exact"),
    Rule(f"{ROLLOUT}.presence_penalty", _other_than(0, 0.0), "0, which the trainer can reproduce", "set it so", "exact"),
    Rule(f"{ROLLOUT}.frequency_penalty", _other_than(0, 0.0), "0, which the trainer can reproduce", "set it so", "exact"),
    Rule(f"{ROLLOUT}.temperature", lambda t: float(t) <= 0, "a positive temperature", "set one", "exact"),
    Rule(f"{ROLLOUT}.logprobs_mode", _other_than("processed_logprobs"), "processed_logprobs", "use it", "exact"),
    Rule(f"{ENGINE}.logprobs_mode", _other_than("processed_logprobs"), "processed_logprobs", "use it", "exact"),
    Rule(f"{ENGINE}.logits_processors", _set, "logits the trainer can reproduce", "leave it out", "exact"),
    Rule("trainer.v1.trainer_mode", _other_than("sync"), "sync: one version of the weights per sample", "use it", "exact"),
)  # fmt: skip


def check(verl_config: Any, config: Config) -> None:
    """Raise ConflictError, ConfigError or ModelError for the first thing that cannot be kept; change nothing."""
    for problem in problems(verl_config, config):
        raise problem


def problems(verl_config: Any, config: Config) -> Iterator[JetrlError]:
    """Everything in verl's configuration that cannot be kept, as the errors to raise."""
    from omegaconf import OmegaConf

    contradiction = disagreement(verl_config, config)
    if contradiction is not None:
        yield contradiction
    for rule in RULES:
        if not rule.applies(config):
            continue
        value = OmegaConf.select(verl_config, rule.path, default=None)
        if value is not None and rule.bad(value):
            mode = f"precision={config.precision!r}, align={config.resolved_align!r}"
            yield rule.error(
                explain(f"verl setting {rule.path} with {mode}", asked=rule.asked, found=repr(value), fix=rule.fix)
            )
    try:
        _check_model(verl_config, config)
    except JetrlError as error:
        yield error


def _check_model(verl_config: Any, config: Config) -> None:
    """The model's family and the rollout's tensor parallelism, from the model's config.json and without weights."""
    from omegaconf import OmegaConf

    if not config.fp8_rollout:
        return
    path = OmegaConf.select(verl_config, f"{MODEL}.hf_config_path", default=None) or OmegaConf.select(
        verl_config, f"{MODEL}.path", default=None
    )
    hf_config = _local_hf_config(path, bool(OmegaConf.select(verl_config, f"{MODEL}.trust_remote_code", default=False)))
    if hf_config is None:
        return  # a remote path: the workers check when they have it
    if config.exact:
        from jetrl_patch.exact.families import check_family

        check_family(hf_config)
    import torch
    from transformers import AutoModelForCausalLM

    from jetrl_patch.fp8.convert import select_layers
    from jetrl_patch.fp8.layers import check_splits

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config)
    modules = dict(model.named_modules())
    names = select_layers(model, config.exclude)
    tp = int(OmegaConf.select(verl_config, f"{ROLLOUT}.tensor_model_parallel_size", default=1))
    check_splits(((name, modules[name].in_features) for name in names), tp)


def _local_hf_config(path: Any, trust_remote_code: bool) -> Any:
    import os

    from transformers import AutoConfig

    if not path or not os.path.isdir(os.path.expanduser(str(path))) or trust_remote_code:
        return None
    return AutoConfig.from_pretrained(os.path.expanduser(str(path)))


def complete(verl_config: Any, config: Config) -> list[str]:
    """Write into verl's configuration what our modes need and its user need not know; what was changed, in words."""
    wanted: dict[str, Any] = {f"{ROLLOUT}.calculate_log_probs": True}
    if config.exact:
        wanted[f"{ROLLOUT}.enforce_eager"] = True  # a compiled graph fuses ops and rounds them otherwise
        wanted[f"{ROLLOUT}.logprobs_mode"] = "processed_logprobs"
    from omegaconf import OmegaConf

    changes = []
    for path, value in wanted.items():
        found = OmegaConf.select(verl_config, path, default=None)
        if found != value:
            changes.append(f"{path}={value!r}, which was {found!r}")
            _update(verl_config, path, value)
    return changes


def prepare(verl_config: Any, config: Config) -> None:
    """Check, then complete, and say in the log what was changed."""
    check(verl_config, config)
    for change in complete(verl_config, config):
        logger.warning("jetrl_patch: %s", change)


def mark(verl_config: Any, config: Config) -> None:
    """Leave our settings in verl's configuration, for the workers to compare with theirs."""
    _update(verl_config, f"{ROLLOUT}.custom.{MARK}", config.to_env())


def _update(verl_config: Any, path: str, value: Any) -> None:
    from omegaconf import OmegaConf

    OmegaConf.update(verl_config, path, value, force_add=True)


def validate_config(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``verl.utils.config.validate_config``: the driver checks before it starts Ray."""

    def validate_config(config: Any, *args: Any, **kwargs: Any) -> Any:
        if runtime.is_active():
            prepare(config, runtime.active_config())
        return original(config, *args, **kwargs)

    return validate_config


def trainer_init(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the trainers' ``__init__``: the same again where the trainer loop runs, and the mark for its workers."""

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        if runtime.is_active():
            prepare(config, runtime.active_config())
            mark(config, runtime.active_config())
        original(self, config, *args, **kwargs)

    return __init__
