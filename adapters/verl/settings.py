"""Check and complete verl's configuration before anything starts, so the user need not edit it. Imports no torch."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

from jetrl_patch import registry, session
from jetrl_patch._versions import PROGRAMS
from jetrl_patch.adapters.verl import (
    checkpoint,
    logprob,
    lora,
    megatron,
    precision,
    rollout,
    support,
    ulysses,
    veomni,
    vision,
)
from jetrl_patch.adapters.verl.correction import problems as correction_problems
from jetrl_patch.adapters.verl.correction import wanted as correction_settings
from jetrl_patch.adapters.verl.yaml_settings import (
    ACTOR,
    ENGINE,
    MODEL,
    REF,
    ROLLOUT,
    Select,
    disagreement,
    mixed,
    model_folder,
    named,
    number_problems,
    runs,
    selector,
    update,
)  # fmt: skip
from jetrl_patch.config import SETTINGS, Config
from jetrl_patch.config.modes import QUANTIZATIONS
from jetrl_patch.errors import ConfigError, ConflictError, JetrlError, NotPatchedError, explain
from jetrl_patch.models.family import DROPOUTS
from jetrl_patch.patching.patch import replacement
from jetrl_patch.trainer.preflight import checkpoint_problems, cut_note, say_share
from jetrl_patch.trainer.rules import (
    MARK,
    Rule,
    broken,
    deterministic,
    is_set,
    more_than_one,
    other_than,
    raised,
    temperature,
)

logger = logging.getLogger(__name__)


# ---- Which of verl's programs the plugin supports ----

PROGRAM = PROGRAMS["verl"]
#: the programs that train with the plugin -> the default name of their configuration, in the folder ``config`` next to them
TRAINERS = {
    PROGRAM: "ppo_trainer",
    "verl.experimental.one_step_off_policy.main_ppo": "one_step_off_ppo_trainer",
    "verl.experimental.fully_async_policy.fully_async_main": "fully_async_ppo_trainer",
}
#: packages whose programs train or generate
_PROGRAMS = ("verl.trainer", "verl.experimental")
#: those that run with the plugin; the evaluation loads no model
_SUPPORTED = (*TRAINERS, "verl.trainer.main_eval")


def program_problem(target: str) -> JetrlError | None:
    """Return the error for a program of verl (module or path) that the plugin supports in no precision; None for any other."""
    module = _module(target)
    if module in _SUPPORTED or not module.startswith(tuple(f"{package}." for package in _PROGRAMS)):
        return None
    required = f"{PROGRAM} or an asynchronous trainer (the plugin needs a policy and a rollout)"
    found = "another program of verl (supervised training, or generation alone)"
    fix = f"use {PROGRAM}, or start this program without jetrl_patch"
    return ConfigError(explain(f"jetrl_patch in {module}", required=required, found=found, fix=fix))


def own_program() -> str:
    """Return the dotted name or path of the program that this process runs; empty if there is none."""
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    return str(spec.name) if spec is not None else str(getattr(main, "__file__", None) or "")


def _module(target: str) -> str:
    """Turn the path of a script in verl's package (``…/verl/trainer/x.py``) into its dotted name. Return others unchanged."""
    if not target.endswith(".py") and os.sep not in target:
        return target.removesuffix(".__main__")
    parts = PurePath(target).with_suffix("").parts
    at = max((i for i, part in enumerate(parts) if part == "verl"), default=None)
    return target if at is None else ".".join(parts[at:])


# ---- Settings that change the trainer's copy of the model's configuration; the rollout reads only config.json ----

_OVERRIDE = f"{MODEL}.override_config"

#: keys that do not change what the model computes: kernels of the same attention, an upper bound of positions, tokens that the
#: engine takes from the tokenizer, the cache of a model that never decodes, and the auxiliary loss of a router
_HARMLESS = (
    "attn_implementation", "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "use_cache",
    "output_router_logits", "router_aux_loss_coef",
)  # fmt: skip
#: keys that exact mode accepts only at 0, as in the rollout
_DROPOUTS = (*DROPOUTS, "embd_pdrop", "resid_pdrop", "hidden_dropout")


def model_problems(select: Select, config: Config) -> Iterator[JetrlError]:
    """Yield an error for each setting that would make the trainer compute a different model than the rollout."""
    other, path = select(f"{MODEL}.hf_config_path"), select(f"{MODEL}.path")
    if not config.quantized_rollout:
        return
    if other not in (None, path):
        what = f"{named(f'{MODEL}.hf_config_path')} with a quantized rollout"
        required = f"{path}, where vLLM reads its configuration"
        yield ConfigError(explain(what, required=required, found=repr(other), fix="set it to null"))
    overrides = select(_OVERRIDE) or {}
    for key, value in (overrides.get("model_config", overrides) or {}).items():  # verl reads only this section with Megatron
        dropout = key in _DROPOUTS
        if key not in _HARMLESS and not (dropout and (not value or not config.exact)):
            what = f"{named(f'{_OVERRIDE}.{key}')} with {'exact mode' if dropout else 'a quantized rollout'}"
            required = "the value in config.json, which the rollout reads"
            yield ConfigError(explain(what, required=required, found=repr(value), fix="remove it and change config.json"))


# ---- Check and complete ----

def _dtype_other_than_bf16(value: Any) -> bool:
    return str(value).removeprefix("torch.") not in ("bf16", "bfloat16")


_ENGINES = ("fsdp", "fsdp2", megatron.STRATEGY, veomni.STRATEGY)
_PROCESSED = "processed_logprobs"
_FALSE = "set it to false"
_NSYS = "set it to nsys"
_OURS = "no quantization but jetrl_patch's"
_TP_ONLY = "a rollout with tensor parallelism only"
_ONLY = "the only value that the trainer reproduces"
_SAMPLED = "those of the distribution that was sampled from, which ratios and corrections need"
_STRATEGY = "fsdp, fsdp2, megatron or veomni"
_FRESH = "samples of this run, with the log-probs of its weights"
_TRANSFERS = "naive or nccl, which send tensors unchanged"

RULES: tuple[Rule, ...] = (
    Rule(f"{ROLLOUT}.name", other_than("vllm"), "vllm", "set it to vllm", "all"),
    Rule("trainer.device", other_than("cuda", "cpu"), "cuda or cpu, for which the plugin has kernels", "set it to cuda", "all"),
    Rule("global_profiler.tool", lambda tool: tool == "npu", "a profiler of CUDA (no kernels for npu)", _NSYS, "all"),
    Rule(f"{ROLLOUT}.agent.custom_async_server.path", is_set, "verl's own vLLM server", "set it to null", "all"),
    *(Rule(f"skip.{name}.enable", is_set, _FRESH, _FALSE, "all") for name in ("rollout", "rollout_tq", "async_rollout")),
    Rule(f"{ROLLOUT}.quantization", is_set, _OURS, "set it to null", "changed", ConflictError),
    Rule(f"{ROLLOUT}.quantization_config_file", is_set, _OURS, "set it to null", "changed", ConflictError),
    Rule(f"{ROLLOUT}.qat.enable", is_set, _OURS, _FALSE, "changed", ConflictError),
    Rule(f"{ACTOR}.fsdp_config.qat.enable", is_set, _OURS, _FALSE, "changed", ConflictError),
    Rule(f"{ENGINE}.quantization", other_than(*QUANTIZATIONS), _OURS, "remove it", "changed", ConflictError),
    Rule(f"{ACTOR}.strategy", other_than(*_ENGINES), _STRATEGY, "set it to fsdp2", "quantized"),
    Rule(f"{REF}.strategy", other_than(*_ENGINES), _STRATEGY, "set it to fsdp2", "quantized"),
    Rule(f"{ROLLOUT}.checkpoint_engine.backend", other_than("naive", "nccl"), _TRANSFERS, "set it to nccl", "quantized"),
    Rule(f"{ROLLOUT}.checkpoint_engine.custom_backend_module", is_set, _TRANSFERS, "set it to null", "quantized"),
    Rule(f"{ROLLOUT}.checkpoint_manager_class", is_set, "verl's own checkpoint manager", "set it to null", "all"),
    Rule(f"{ROLLOUT}.disaggregation.enabled", is_set, _TP_ONLY, _FALSE, "quantized"),
    Rule(f"{ROLLOUT}.pipeline_model_parallel_size", more_than_one, _TP_ONLY, "set it to 1", "quantized"),
    Rule(f"{ROLLOUT}.mtp.enable", is_set, "no drafts of a model, whose weights are not synced", _FALSE, "quantized"),
    Rule(f"{ROLLOUT}.full_determinism", is_set, "the plugin's own kernels, not vLLM's batch-invariant ones", _FALSE, "quantized"),
    Rule(f"{ROLLOUT}.dtype", _dtype_other_than_bf16, "bfloat16", "set it to bfloat16", "quantized"),
    Rule(f"{ACTOR}.fsdp_config.mixed_precision.param_dtype", _dtype_other_than_bf16, "bf16", "set it to bf16", "quantized"),
    Rule(f"{REF}.fsdp_config.mixed_precision.param_dtype", _dtype_other_than_bf16, "bf16", "set it to bf16", "quantized"),
    Rule(f"{MODEL}.use_liger", is_set, "exact mode's own norm, RoPE and activation", _FALSE, "exact", ConflictError),
    Rule(f"{MODEL}.tiled_mlp.enabled", is_set, "exact mode's own MLP", _FALSE, "exact", ConflictError),
    Rule(f"{ROLLOUT}.data_parallel_size", more_than_one, _TP_ONLY, "set it to 1 and use more replicas", "exact"),
    Rule(f"{ROLLOUT}.repetition_penalty", other_than(1), f"1.0, {_ONLY}", "set it to 1.0", "exact"),
    Rule(f"{ROLLOUT}.min_tokens", other_than(0), f"0, {_ONLY}", "set it to 0", "exact"),
    Rule(f"{ROLLOUT}.presence_penalty", other_than(0), f"0, {_ONLY}", "set it to 0", "exact"),
    Rule(f"{ROLLOUT}.frequency_penalty", other_than(0), f"0, {_ONLY}", "set it to 0", "exact"),
    *temperature(f"{ROLLOUT}.temperature"),
    *(
        Rule(f"{path}.logprobs_mode", other_than(_PROCESSED), f"{_PROCESSED}, {_SAMPLED}", f"set it to {_PROCESSED}", "all")
        for path in (ROLLOUT, ENGINE)
    ),
)  # fmt: skip

#: what verl's V1 trainer lacks, and its V0 trainer has
_V1_RULES = (
    Rule(
        "algorithm.adv_estimator",
        lambda estimator: estimator == "remax",
        "an estimator without a baseline of greedy samples, which verl's V1 trainer does not draw (it fails in its first step)",
        "use verl's V0 trainer (trainer.use_v1=false)",
        "all",
    ),
)

_PATHS = {rule.path for rule in RULES}


def check(verl_config: Any, config: Config) -> None:
    """Raise the first error of ``problems``."""
    for problem in problems(verl_config, config):
        raise problem


def problems(verl_config: Any, config: Config) -> Iterator[JetrlError]:
    """Yield a ConflictError, ConfigError or ModelError for each setting of verl that the mode does not support."""
    contradiction = disagreement(verl_config, config)
    if contradiction is not None:
        yield contradiction
    select = selector(verl_config)
    yield from number_problems(select)
    determinism = deterministic(config, *(f"{path}.fsdp_config.full_determinism" for path in (ACTOR, REF)))
    v1 = _V1_RULES if select("trainer.use_v1") else ()
    yield from broken((*RULES, *determinism, *v1), select, config, named)
    yield from rollout.async_problems(select, config)
    yield from model_problems(select, config)
    yield from rollout.rank_problems(select, config)
    given = {str(name): value for name, value in (select(ENGINE) or {}).items() if f"{ENGINE}.{name}" not in _PATHS}
    tp = rollout.tensor_parallel(select)
    yield from registry.rollout().argument_problems(given, config, tp, lambda name: named(f"{ENGINE}.{name}"))
    yield from lora.gather_problems(select, config)
    yield from lora.problems(select, config)
    yield from rollout.engine_problems(select, config)
    yield from ulysses.problems(select)
    yield from rollout.problems(select, config)
    yield from rollout.data_problems(select, config)
    if config.old_log_probs != "auto":  # ``chosen`` resolves "auto"
        yield from rollout.old_log_prob_problems(select, config)
    yield from precision.optimizer_problems(select, config)
    yield from checkpoint.problems(select, config)
    yield from precision.problems(select, config)
    for strategy, engine_problems in ((megatron.STRATEGY, megatron.problems), (veomni.STRATEGY, veomni.problems)):
        if runs(strategy, select, config):
            yield from mixed(strategy, select) or engine_problems(select, config)
            break
    yield from correction_problems(verl_config, config)
    yield from support.problems(select, config)
    yield from _model_problems(select, config)


def _model_problems(select: Select, config: Config) -> Iterator[JetrlError]:
    """Check the model's config.json: its family, and how the rollout splits it. Loads no weights."""
    path, _, tp, ep = _checkpoint(select, config)
    trust = bool(select(f"{MODEL}.trust_remote_code"))
    if ep not in (1, tp):  # ``rollout.rank_problems`` has reported it
        ep = 1
    hf_config = yield from checkpoint_problems(path, config, tp, ep, trust_remote_code=trust)
    if hf_config is None:
        return
    yield from ulysses.model_problems(select, hf_config)
    yield from vision.problems(select, hf_config, config.exact)
    yield from raised(lambda: lora.check_model(hf_config, select, config))
    if config.exact:
        from jetrl_patch.exact.modules import check_kernels  # with torch

        yield from raised(lambda: check_kernels(hf_config, config, str(select("trainer.device"))))
    if logprob.is_used(select, config):
        yield from raised(lambda: logprob.check_model(hf_config))
    if runs(veomni.STRATEGY, select, config):
        yield from raised(lambda: veomni.check_model(hf_config))
    if runs(megatron.STRATEGY, select, config):
        roles = (lambda name, role=role: select(f"{role}.megatron.{name}") for role in (ACTOR, REF))
        for sizes in dict.fromkeys(map(megatron.Sizes.of, roles)):
            yield from raised(lambda: megatron.check_model(hf_config, sizes, config))  # noqa: B023


def _checkpoint(select: Select, config: Config) -> tuple[Any, Config, int, int]:
    """Return the model's folder, the settings, and the rollout's tensor-parallel and expert-parallel sizes."""
    return model_folder(select), config, rollout.tensor_parallel(select), rollout.expert_parallel(select, config)


def complete(verl_config: Any, config: Config) -> list[str]:
    """Set what the mode needs in verl's configuration; return a description of each change."""
    wanted: dict[str, Any] = {f"{ROLLOUT}.calculate_log_probs": True, f"{ROLLOUT}.logprobs_mode": _PROCESSED}
    if (config.exact or config.guard_sqnr is not None) and not config.may_capture:
        # a compiled graph fuses ops, which changes the rounding, and keeps layers in FP8 that the guard has moved to BF16
        wanted[f"{ROLLOUT}.enforce_eager"] = True
    elif config.decode_graphs is True:
        wanted[f"{ROLLOUT}.enforce_eager"] = False
    wanted |= precision.wanted(config)
    select = selector(verl_config)
    if (ep := rollout.expert_parallel(select, config)) > 1:
        wanted[rollout.EXPERTS] = ep
    if config.returns_routes:
        wanted[rollout.RETURN] = True
    if runs(megatron.STRATEGY, select, config):
        wanted |= megatron.wanted(select, config)
    fused = logprob.is_used(select, config)
    if fused and not runs(megatron.STRATEGY, select, config):
        wanted[logprob.IMPLEMENTATION] = "torch"  # only this implementation calls ``FusedLinearForPPO``
    wanted |= lora.wanted(select, config)
    wanted |= correction_settings(verl_config, config)
    wanted |= precision.optimizer_wanted(select, config)
    wanted |= rollout.engine_dtypes(select, config)  # last, because a teacher's dtype may refer to the rollout's
    replaces = "log-probs and entropies come from the run's own head, in chunks, instead of verl's fused kernels"
    changes = [f"{logprob.USED}: {replaces}"] * fused + cut_note(*_checkpoint(select, config))
    tp = rollout.tensor_parallel(select)
    why = {rollout.EXPERTS: f": tensor parallel size {tp} would cut a block of the experts, so each rank holds whole ones"}
    for path, value in wanted.items():
        found = select(path)
        if found != value:
            changes.append(f"{path}={value!r}, which was {found!r}{why.get(path, '')}")
            update(verl_config, path, value)
    return changes


def prepare(verl_config: Any, config: Config) -> None:
    """Check the configuration, complete it, and log each change and how much of the model is FP8."""
    check(verl_config, config)
    say_share(*_checkpoint(selector(verl_config), config))
    for change in complete(verl_config, config):
        logger.warning("jetrl_patch: %s", change)


def chosen(verl_config: Any, asked: Config) -> Config:
    """Return the plugin's settings, in which verl's settings decide what the user left open."""
    select = selector(verl_config)
    return rollout.chosen(select, megatron.chosen(select, asked))


def adopt(verl_config: Any) -> None:
    """Restart this process's session if ``chosen`` returns other settings than the active ones.

    Raises NotPatchedError if the driver has already connected to Ray: its workers have the earlier settings.
    """
    asked = session.asked_config()
    wanted = chosen(verl_config, asked)
    if wanted != asked:
        changed = [name for name in SETTINGS if getattr(wanted, name) != getattr(asked, name)]
        words = ", ".join(f"{name}={getattr(wanted, name)!r}" for name in changed)
        session.disable()
        try:
            session.enable(wanted)
        except NotPatchedError as error:
            required, found = f"{words}, which verl's settings need", "Ray workers that were started without it"
            raise NotPatchedError(explain("enable()", required=required, found=found, fix=f"call it with {words}")) from error
        logger.warning("jetrl_patch: %s, because verl's settings need it", words)


def mark(verl_config: Any, config: Config) -> None:
    """Store the plugin's settings in verl's configuration (``rollout.custom``), for each worker to compare with its own."""
    update(verl_config, f"{ROLLOUT}.custom.{MARK}", config.to_env())


@replacement
def settled(original: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap ``validate_config`` and ``run_ppo``: before anything starts, ``adopt`` the settings and ``prepare`` verl's.

    Every program of verl starts Ray in ``main_ppo.run_ppo``. The asynchronous ones do not call ``validate_config`` first.
    Raises NotPatchedError if Ray was connected by an ``init`` that was imported by name before ``enable()`` patched it.
    """
    adopt(config)
    registry.resolve("ray").check(session.active_config())
    prepare(config, session.active_config())
    return original(config, *args, **kwargs)


@replacement
def trainer_init(original: Any, self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
    """Wrap the trainers' ``__init__`` with ``_check_again``."""
    _check_again(config)
    original(self, config, *args, **kwargs)


@replacement
def separate_pools(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap ``SeparateRayPPOTrainer._init_resource_pools`` with ``_check_again``: its workers have not started yet."""
    _check_again(self.config)
    return original(self, *args, **kwargs)


def _check_again(verl_config: Any) -> None:
    """Repeat the driver's checks in the trainer loop's process, and mark the settings for its workers."""
    config = session.active_config()
    prepare(verl_config, config)
    for problem in rollout.old_log_prob_problems(selector(verl_config), config):
        raise problem  # verl's settings need the pass for old log-probs, and nobody called ``adopt``
    mark(verl_config, config)
