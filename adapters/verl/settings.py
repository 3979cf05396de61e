"""verl's configuration, checked and completed before anything starts, so that the user changes nothing in it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

from jetrl_patch import runtime
from jetrl_patch.adapters.verl import gather, megatron, precision
from jetrl_patch.adapters.verl.correction import problems as correction_problems
from jetrl_patch.adapters.verl.correction import wanted as correction_settings
from jetrl_patch.adapters.verl.optimizer import problems as optimizer_problems
from jetrl_patch.adapters.verl.optimizer import wanted as optimizer_settings
from jetrl_patch.adapters.verl.paths import ACTOR, ENGINE, MODEL, REF, ROLLOUT, named
from jetrl_patch.adapters.verl.section import disagreement
from jetrl_patch.config import Config
from jetrl_patch.config.modes import QUANTIZATIONS
from jetrl_patch.errors import ConflictError, JetrlError
from jetrl_patch.gate import while_active
from jetrl_patch.trainer.marks import MARK
from jetrl_patch.trainer.preflight import check_checkpoint
from jetrl_patch.trainer.rules import Rule, broken, is_set, more_than_one, other_than, positive, raised

logger = logging.getLogger(__name__)


def _dtype_other_than_bf16(value: Any) -> bool:
    return str(value).removeprefix("torch.") not in ("bf16", "bfloat16")


_ENGINES = ("fsdp", "fsdp2", megatron.STRATEGY)
_OFF = "switch it off"
_QUANTIZED = "no other quantization beside jetrl_patch (precision='bf16' measures it)"
_PARALLEL = "a trainer that holds whole sequences and a rollout of plain tensor parallelism"

RULES: tuple[Rule, ...] = (
    Rule(f"{ROLLOUT}.name", other_than("vllm"), "vllm", "set rollout.name=vllm", "all"),
    Rule(f"{ROLLOUT}.quantization", is_set, _QUANTIZED, "set it to null", "changed", ConflictError),
    Rule(f"{ROLLOUT}.quantization_config_file", is_set, _QUANTIZED, "set it to null", "changed", ConflictError),
    Rule(f"{ROLLOUT}.qat.enable", is_set, _QUANTIZED, _OFF, "changed", ConflictError),
    Rule(f"{ACTOR}.fsdp_config.qat.enable", is_set, _QUANTIZED, _OFF, "changed", ConflictError),
    Rule(f"{ENGINE}.quantization", other_than(*QUANTIZATIONS), _QUANTIZED, "leave it out", "changed", ConflictError),
    Rule(f"{MODEL}.lora_rank", positive, "full weights", "set it to 0", "quantized", ConflictError),
    Rule(f"{MODEL}.lora.rank", positive, "full weights", "set it to 0", "quantized", ConflictError),
    Rule(f"{MODEL}.lora_adapter_path", is_set, "full weights", "set it to null", "quantized", ConflictError),
    Rule(f"{ACTOR}.strategy", other_than(*_ENGINES), ", ".join(_ENGINES), "use one of them", "quantized"),
    Rule(f"{REF}.strategy", other_than(*_ENGINES), ", ".join(_ENGINES), "use one of them", "quantized"),
    Rule(f"{ROLLOUT}.checkpoint_engine.backend", other_than("naive"), "naive", "use it", "quantized"),
    Rule(f"{ROLLOUT}.checkpoint_manager_class", is_set, "verl's own manager", "leave it out", "all"),
    Rule(f"{ROLLOUT}.disaggregation.enabled", is_set, _PARALLEL, _OFF, "quantized"),
    Rule(f"{ROLLOUT}.pipeline_model_parallel_size", more_than_one, _PARALLEL, "set it to 1", "quantized"),
    Rule(f"{ROLLOUT}.expert_parallel_size", more_than_one, _PARALLEL, "set it to 1", "quantized"),
    Rule(f"{ROLLOUT}.mtp.enable", is_set, "no speculative decoding", _OFF, "quantized"),
    Rule(f"{ENGINE}.speculative_config", is_set, "no speculative decoding", "leave it out", "quantized"),
    Rule(f"{ROLLOUT}.dtype", _dtype_other_than_bf16, "bfloat16", "set it so", "quantized"),
    Rule(f"{ACTOR}.fsdp_config.mixed_precision.param_dtype", _dtype_other_than_bf16, "bf16", "set it so", "quantized"),
    Rule(f"{ROLLOUT}.layered_summon", is_set, "whole weights at sync", _OFF, "quantized"),
    Rule("reward.reward_model.enable", is_set, "vLLM engines that serve the policy", "use a reward function", "quantized"),
    Rule("distillation.enabled", is_set, "vLLM engines that serve the policy", _OFF, "quantized"),
    Rule(f"{MODEL}.use_fused_kernels", is_set, "log-probs from full logits", _OFF, "exact"),
    Rule(f"{MODEL}.use_liger", is_set, "norm, RoPE and activation of exact mode", _OFF, "exact", ConflictError),
    Rule(f"{ACTOR}.ulysses_sequence_parallel_size", more_than_one, _PARALLEL, "set it to 1", "exact"),
    Rule(f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size", more_than_one, _PARALLEL, "set it to 1", "exact"),
    Rule(f"{ACTOR}.use_prefix_grouper", is_set, "the attention of exact mode", _OFF, "exact"),
    Rule(f"{ROLLOUT}.data_parallel_size", more_than_one, _PARALLEL, "use more replicas instead", "exact"),
    Rule(f"{ROLLOUT}.top_p", other_than(1, 1.0), "1, which the trainer can reproduce", "set it so", "exact"),
    Rule(f"{ROLLOUT}.top_k", other_than(-1, 0), "-1, which the trainer can reproduce", "set it so", "exact"),
    Rule(f"{ROLLOUT}.repetition_penalty", other_than(1, 1.0), "1.0, which the trainer can reproduce", "set it so", "exact"),
    Rule(f"{ROLLOUT}.min_p", other_than(0, 0.0), "0, which the trainer can reproduce", "set it so", "exact"),
    Rule(f"{ROLLOUT}.min_tokens", other_than(0), "0, which the trainer can reproduce", "set it so", "exact"),
    Rule(f"{ROLLOUT}.presence_penalty", other_than(0, 0.0), "0, which the trainer can reproduce", "set it so", "exact"),
    Rule(f"{ROLLOUT}.frequency_penalty", other_than(0, 0.0), "0, which the trainer can reproduce", "set it so", "exact"),
    Rule(f"{ROLLOUT}.temperature", lambda t: float(t) <= 0, "a positive temperature", "set one", "exact"),
    Rule(f"{ROLLOUT}.logprobs_mode", other_than("processed_logprobs"), "processed_logprobs", "use it", "exact"),
    Rule(f"{ENGINE}.logprobs_mode", other_than("processed_logprobs"), "processed_logprobs", "use it", "exact"),
    Rule(f"{ENGINE}.logits_processors", is_set, "logits the trainer can reproduce", "leave it out", "exact"),
    Rule("trainer.v1.trainer_mode", other_than("sync"), "sync: one version of the weights per sample", "use it", "exact"),
)  # fmt: skip


def check(verl_config: Any, config: Config) -> None:
    """Raise ConflictError, ConfigError or ModelError for the first thing that cannot be kept; change nothing."""
    for problem in problems(verl_config, config):
        raise problem


def problems(verl_config: Any, config: Config) -> Iterator[JetrlError]:
    """Everything in verl's configuration that cannot be kept, as the errors to raise."""
    contradiction = disagreement(verl_config, config)
    if contradiction is not None:
        yield contradiction
    select = _selector(verl_config)
    yield from broken(RULES, select, config, named)
    yield from gather.problems(select, config)
    yield from optimizer_problems(select, config)
    yield from precision.problems(select, config)
    if megatron.is_chosen(select, config):
        yield from megatron.problems(select, config)
    yield from correction_problems(verl_config, config)
    yield from raised(lambda: _check_model(select, config))


def _check_model(select: Callable[[str], Any], config: Config) -> None:
    """The model's family and the rollout's tensor parallelism, from the model's config.json and without weights."""
    path = select(f"{MODEL}.hf_config_path") or select(f"{MODEL}.path")
    tp = int(select(f"{ROLLOUT}.tensor_model_parallel_size") or 1)
    hf_config = check_checkpoint(path, config, tp, bool(select(f"{MODEL}.trust_remote_code")))
    if hf_config is not None and megatron.is_chosen(select, config):
        megatron.check_model(hf_config, int(select(f"{megatron.MEGATRON}.tensor_model_parallel_size") or 1))


def complete(verl_config: Any, config: Config) -> list[str]:
    """Write into verl's configuration what our modes need and its user need not know; what was changed, in words."""
    wanted: dict[str, Any] = {f"{ROLLOUT}.calculate_log_probs": True}
    if config.exact or config.guard_sqnr is not None:
        # a compiled graph fuses ops and rounds them otherwise; and it would go on with layers that left FP8
        wanted[f"{ROLLOUT}.enforce_eager"] = True
    if config.exact:
        wanted[f"{ROLLOUT}.logprobs_mode"] = "processed_logprobs"
    wanted |= precision.wanted(config)
    select = _selector(verl_config)
    if megatron.is_chosen(select, config):
        wanted |= megatron.wanted(select)
    wanted |= correction_settings(verl_config, config)
    wanted |= optimizer_settings(select, config)
    changes = []
    for path, value in wanted.items():
        found = select(path)
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
    """Leave our settings in verl's configuration (``rollout.custom``), for the workers to compare with theirs."""
    _update(verl_config, f"{ROLLOUT}.custom.{MARK}", config.to_env())


def _selector(verl_config: Any) -> Callable[[str], Any]:
    """What gives the value at a dotted path of verl's configuration, None where there is none."""
    from omegaconf import OmegaConf

    return lambda path: OmegaConf.select(verl_config, path, default=None)


def _update(verl_config: Any, path: str, value: Any) -> None:
    from omegaconf import OmegaConf

    OmegaConf.update(verl_config, path, value, force_add=True)


@while_active
def validate_config(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``verl.utils.config.validate_config``: the driver checks before it starts Ray."""

    def validate_config(config: Any, *args: Any, **kwargs: Any) -> Any:
        prepare(config, runtime.active_config())
        return original(config, *args, **kwargs)

    return validate_config


@while_active
def trainer_init(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the trainers' ``__init__``: the same again where the trainer loop runs, and the mark for its workers."""

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        prepare(config, runtime.active_config())
        mark(config, runtime.active_config())
        original(self, config, *args, **kwargs)

    return __init__
