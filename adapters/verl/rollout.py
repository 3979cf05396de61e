"""verl's rollout: settings for ranks, routes, old log-probs and asynchronous trainers; engines of reward models and teachers.

Imports no torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from jetrl_patch import registry, session
from jetrl_patch.adapters.verl import support, ulysses
from jetrl_patch.adapters.verl.precision import FP16
from jetrl_patch.adapters.verl.yaml_settings import (
    ACTOR,
    MODEL,
    ROLLOUT,
    Select,
    data_files,
    model_folder,
    named,
    whole,
)
from jetrl_patch.config import Config
from jetrl_patch.errors import UNQUANTIZED, ConfigError, JetrlError, explain
from jetrl_patch.patching.patch import replacement
from jetrl_patch.trainer.preflight import needed_ep
from jetrl_patch.trainer.rules import Rule, broken, is_set, other_than, positive, route_setting

# ---- The ranks over which an engine splits the model; the trainer adds its partial sums in the same order ----

#: verl's setting of the expert-parallel size, 1 by default
EXPERTS = f"{ROLLOUT}.expert_parallel_size"


def tensor_parallel(select: Select) -> int:
    """Return the tensor-parallel size."""
    return whole(select, f"{ROLLOUT}.tensor_model_parallel_size")


def expert_parallel(select: Select, config: Config) -> int:
    """Return the expert-parallel size: the user's if it is above 1, else one with which no rank cuts a block of the experts.

    verl requires expert-parallel size = tensor-parallel size × data-parallel size. FP8 experts do not support data parallelism
    inside an engine, so with it the size stays 1.
    """
    given, dp = whole(select, EXPERTS), whole(select, f"{ROLLOUT}.data_parallel_size")
    if given > 1 or dp > 1:
        return given
    trust = bool(select(f"{MODEL}.trust_remote_code"))
    return needed_ep(model_folder(select), config, tensor_parallel(select), trust_remote_code=trust)


def rank_problems(select: Select, config: Config) -> Iterator[JetrlError]:
    """Yield an error if the experts are not on the tensor-parallel ranks of one engine."""
    tp = tensor_parallel(select)
    required = f"1, or tensor_model_parallel_size={tp}, because an engine's experts stay on its tensor-parallel ranks"
    rule = Rule(EXPERTS, other_than(0, 1, tp), required, "set it to one of the two", "quantized")
    yield from broken((rule,), select, config, named, f"precision={config.precision!r}")


# ---- Routes (``measure_routes``, ``router_replay``), and verl's own router replay ----

RETURN = f"{ROLLOUT}.enable_rollout_routing_replay"
_FSDP = "no replay of routes, which verl 0.9.1 has only in its Megatron and VeOmni engines (its FSDP engine ignores them)"
_MEGATRON = "no replay of routes, because the plugin's experts in Megatron choose their own"
_INSTEAD = "set it to disabled, and use jetrl_patch's router_replay='R3' with FSDP"
_FULL = "full weights (with adapters, the reference pass computes with other weights than the rollout)"

#: verl's router replay (R2, R3), in every mode with a quantized rollout
_ROUTE_RULES: tuple[Rule, ...] = tuple(
    Rule(f"{ACTOR}.{engine}.router_replay.mode", other_than("disabled"), required, _INSTEAD, "quantized")
    for engine, required in (("fsdp_config", _FSDP), ("megatron", _MEGATRON))
)
_RETURNED = (
    Rule(RETURN, is_set, _FSDP, "set it to false, or use measure_routes or router_replay, which set it", "quantized"),
)
_MEASURED: tuple[Rule, ...] = (
    Rule(f"{ACTOR}.strategy", other_than("fsdp", "fsdp2"), "fsdp or fsdp2", "set it to fsdp2, or turn routes off", "all"),
    *(
        Rule(f"{MODEL}.{name}", bad, _FULL, "train full weights, or turn routes off", "all")
        for name, bad in (("lora_rank", positive), ("lora.rank", positive), ("lora_adapter_path", is_set))
    ),
)


def problems(select: Select, config: Config) -> Iterator[JetrlError]:
    """Yield an error for each setting with which verl would replay routes, or nobody could compare them."""
    yield from broken(_ROUTE_RULES if config.returns_routes else (*_ROUTE_RULES, *_RETURNED), select, config, named)
    if not config.returns_routes:
        return
    setting = route_setting(config)
    version = registry.rollout().routes_error(setting) if config.quantized_rollout else None
    if version is not None:
        yield version
    yield from broken(_MEASURED, select, config, named, setting)
    for size, path in ulysses.sizes(select).items():
        required, fix = "whole sequences on each rank", "set it to 1, or turn routes off"
        yield ConfigError(explain(f"{named(path)} with {setting}", required=required, found=str(size), fix=fix))


# ---- ``old_log_probs="rollout"``: settings that need verl's pass for old log-probs, or disable the check which replaces it ----

_NO_SUM = "no sum over the vocabulary, which only the pass computes"
_COMPARED = "a policy loss for every update, which compares the log-probs"
_ONE_VERSION = "samples of one version of the weights, which only a synchronous trainer has"
_REPORTED = "naive, after whose sync the workers report the comparison"


def _rule(path: str, bad: Callable[[Any], bool], required: str, value: str) -> Rule:
    return Rule(path, bad, required, f"set it to {value}, or use old_log_probs='recompute'", "all")


_RULES: tuple[Rule, ...] = (
    _rule(f"{ACTOR}.strategy", other_than("fsdp", "fsdp2", "megatron"), "fsdp, fsdp2 or megatron", "fsdp2"),
    _rule(f"{ACTOR}.calculate_sum_pi_squared", is_set, _NO_SUM, "false"),
    _rule(f"{ACTOR}.fsdp_config.router_replay.mode", other_than("disabled"), "no routes recorded by the pass", "disabled"),
    _rule("distillation.enabled", is_set, _COMPARED, "false"),
    _rule("trainer.v1.trainer_mode", other_than("sync"), _ONE_VERSION, "sync"),
    _rule(f"{ROLLOUT}.checkpoint_engine.backend", other_than("naive"), _REPORTED, "naive"),
)


def chosen(select: Select, asked: Config) -> Config:
    """Set ``old_log_probs="recompute"`` in the unresolved settings ``asked`` if the user left it open and verl needs the pass."""
    needed = asked.old_log_probs == "auto" and any(old_log_prob_problems(select, asked))
    return asked.replace(old_log_probs="recompute") if needed else asked


def old_log_prob_problems(select: Select, config: Config) -> Iterator[JetrlError]:
    """Yield an error for each setting of verl that needs the pass, or that disables the check which replaces it."""
    if config.skips_old_pass:
        yield from broken(_RULES, select, config, named, "old_log_probs='rollout'")


# ---- Asynchronous trainers: which of their settings are refused, and why the others change no bit ----

#: the sections of verl's configuration that only asynchronous trainers read
PROGRAM, COLOCATED, SEPARATE = "async_training", "trainer.v1.colocate_async", "trainer.v1.separate_async"
_HYBRID = f"{SEPARATE}.hybrid_rollout"

ASYNC_RULES: tuple[Rule, ...] = tuple(
    Rule(path, is_set, "a rollout that stays on its own devices", "set it to false", "all")
    for path in (
        f"{PROGRAM}.use_trainer_do_validate",
        f"{PROGRAM}.use_dynamic_resource_scheduling",
        f"{_HYBRID}.enable_switch",
    )
)

_WHEN = "it decides when samples are made and weights are sent, and each sample records the version of its weights"
_LENDING = "it is read only if the rollout borrows the trainer's devices, which is refused"

#: every other setting of these sections -> why it is harmless
HARMLESS: dict[str, str] = {
    f"{section}.{name}": why
    for section, names, why in (
        (PROGRAM, "staleness_threshold trigger_parameter_sync_step require_batches", _WHEN),
        (COLOCATED, "num_warmup_batches", _WHEN),
        (SEPARATE, "num_warmup_batches parameter_sync_step", _WHEN),
        (PROGRAM, "partial_rollout", "a sample that spans a sync records both versions and counts as stale"),
        (PROGRAM, "concurrent_samples_per_replica", "a token's bits do not depend on the other requests in its batch"),
        (PROGRAM, "dynamic_schedule_policy dynamic_schedule_deactivate_ratio dynamic_schedule_enable_rebalance", _LENDING),
        (_HYBRID, "switch_threshold_ratio adaptive_switch_threshold switch_cost_window_size", _LENDING),
        (_HYBRID, "switch_threshold_step_up switch_threshold_step_down switch_threshold_release_steps", _LENDING),
    )
    for name in names.split()
}


def async_problems(select: Select, config: Config) -> Iterator[JetrlError]:
    """Yield an error for each setting that lends devices and, with a quantized rollout, for each one not in ``HARMLESS``."""
    yield from broken(ASYNC_RULES, select, config, named)
    if not config.quantized_rollout:
        return
    known = {*HARMLESS, *(rule.path for rule in ASYNC_RULES)}
    for section in (PROGRAM, COLOCATED, SEPARATE):
        for path, value in leaves(section, select(section)):
            if path not in known:
                what, required = f"{named(path)} with precision={config.precision!r}", "a setting that verl 0.9 has"
                yield ConfigError(explain(what, required=required, found=repr(value), fix=f"remove it, or use {UNQUANTIZED}"))


def leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield each setting below a path that has a value. Skips Hydra's own keys, which begin with an underscore."""
    if not isinstance(value, Mapping):
        if value is not None:
            yield path, value
        return
    for name, below in value.items():
        if not str(name).startswith("_"):
            yield from leaves(f"{path}.{name}", below)


# ---- Rows of the data that ask for greedy decoding -----------------------------------------------

#: the column, which verl's agent loops read
_GREEDY = "__do_sample__"


def data_problems(select: Select, config: Config) -> Iterator[JetrlError]:
    """Yield an error for training data with such rows, unless the temperature is 1, or a sample brings its own.

    vLLM gives greedy samples their log-probs at temperature 1, the trainer computes all of them at the rollout's.
    """
    temperature = select(f"{ROLLOUT}.temperature")
    follows = config.exact and not any(support.unfollowed(select).values())
    if config.mode.only_measures or temperature == 1 or follows:
        return
    for setting, path in data_files(select):
        if setting == "data.train_files" and _GREEDY in _columns(os.path.expanduser(path)):
            required = f"no column {_GREEDY} with {ROLLOUT}.temperature={temperature} (greedy samples have log-probs at 1)"
            fix = "remove the column, or set the temperature to 1"
            yield ConfigError(explain(named(setting), required=required, found=f"one in {path}", fix=fix))


def _columns(path: str) -> Collection[str]:
    """The columns of a local file of samples; none if it cannot be read, which verl reports."""
    if not os.path.isfile(path):
        return ()
    try:
        if path.endswith(".parquet"):
            from pyarrow.parquet import read_schema

            return list(read_schema(path).names)
        with open(path, encoding="utf-8") as file:
            return dict(json.loads(file.readline()))
    except (OSError, ValueError):  # pyarrow's errors are ValueErrors
        return ()


# ---- Engines other than the policy's: verl's reward models and distillation teachers ----
# The weight sync does not feed these vLLM engines, so they must compute as without the plugin. Their processes, and those that
# inherit their environment, run it with ``precision="bf16"``: no quantization, no exact ops, no eager mode. Only the CPU platform
# stays, on a machine without an accelerator.
#
# verl starts each engine in a ``vLLMHttpServer`` actor, and only the replica in the trainer loop knows what the engine is for. So
# the replica of a reward model or teacher starts a subclass of the server, which changes the settings first.

_REWARD = "reward.reward_model"
_TEACHERS = "distillation.teacher_models"


@replacement
def replica_init(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """Wrap ``vLLMReplica.__init__``: start the engines of reward models and teachers in ``unpatched_server``."""
    original(self, *args, **kwargs)
    if self.is_reward_model or self.is_teacher_model:
        import ray

        self.server_class = ray.remote(unpatched_server())


def unpatched_server() -> type:
    """Return a subclass of verl's server that first calls ``only_measure``. Ray pickles it by value."""
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

    class UnpatchedHttpServer(vLLMHttpServer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            only_measure()
            vLLMHttpServer.__init__(self, *args, **kwargs)

    return UnpatchedHttpServer


def only_measure() -> None:
    """Give this process, and the engine's processes that inherit from it, settings that change no engine."""
    if session.is_active():
        config = session.active_config()
        session.disable()
        session.enable(Config(precision="bf16", platform=config.platform, upstream_fixes=config.fixes_upstream))


def engine_problems(select: Select, config: Config) -> Iterator[JetrlError]:
    """Yield an error for each of these engines that runs in FP16, which ``precision="bf16"`` does not support."""
    for path, dtype in engine_dtypes(select, config).items():
        if str(dtype).removeprefix("torch.") in FP16:
            yield ConfigError(explain(named(path), required="bfloat16", found=repr(dtype), fix="set it to bfloat16"))


def engine_dtypes(select: Select, config: Config) -> dict[str, Any]:
    """Return each of these engines' dtype as it is now (path -> value): a teacher's refers to the rollout's by default."""
    if config.mode.only_measures:
        return {}
    rollouts = [f"{_REWARD}.rollout"] if select(f"{_REWARD}.enable") else []
    if select("distillation.enabled"):
        rollouts += [f"{_TEACHERS}.{name}.inference" for name in select(_TEACHERS) or {}]
    return {f"{path}.dtype": select(f"{path}.dtype") for path in rollouts}
