"""Settings of verl around its rollout: the ranks of an engine, routes, and ``old_log_probs="rollout"``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from jetrl_patch import registry
from jetrl_patch.adapters.verl import ulysses
from jetrl_patch.adapters.verl.yaml_settings import ACTOR, MODEL, ROLLOUT, model_folder, named
from jetrl_patch.config import Config
from jetrl_patch.errors import ConfigError, JetrlError, explain
from jetrl_patch.trainer.preflight import needed_ep
from jetrl_patch.trainer.rules import Rule, broken, is_set, other_than, positive

__all__ = [
    "EXPERTS", "beside", "chosen", "expert_parallel", "old_log_prob_problems", "problems", "rank_problems", "reason",
    "tensor_parallel", "wanted", "wanted_ranks",
]  # fmt: skip


# ---- How verl's rollout splits a model over the ranks of an engine, which the trainer's sums follow

#: verl's setting of the expert-parallel size, 1 by default
EXPERTS = f"{ROLLOUT}.expert_parallel_size"


def tensor_parallel(select: Callable[[str], Any]) -> int:
    """Return the tensor-parallel size."""
    return int(select(f"{ROLLOUT}.tensor_model_parallel_size") or 1)


def expert_parallel(select: Callable[[str], Any], config: Config) -> int:
    """Return the expert-parallel size: the user's, or if that is 1 the one that ``wanted`` sets."""
    given = _given(select)
    return given if given > 1 else int(wanted_ranks(select, config).get(EXPERTS, given))


def wanted_ranks(select: Callable[[str], Any], config: Config) -> dict[str, int]:
    """Return the setting for experts of which tensor parallelism would cut a block: path -> value; empty if none is needed.

    verl wants the product of tensor-parallel and data-parallel size; data parallelism inside an engine has no experts in FP8.
    """
    tp, dp = tensor_parallel(select), int(select(f"{ROLLOUT}.data_parallel_size") or 1)
    if _given(select) > 1 or dp > 1:
        return {}
    ep = needed_ep(model_folder(select), config, tp, trust_remote_code=bool(select(f"{MODEL}.trust_remote_code")))
    return {EXPERTS: ep} if ep > 1 else {}


def reason(select: Callable[[str], Any]) -> str:
    """Say why ``wanted`` sets what it does."""
    return f"tensor parallel size {tensor_parallel(select)} would cut a block of the experts, which now stay whole"


def rank_problems(select: Callable[[str], Any], config: Config) -> Iterator[JetrlError]:
    """Yield an error for experts on other ranks than those of one engine."""
    tp, ep = tensor_parallel(select), _given(select)
    if config.quantized_rollout and ep not in (1, tp):
        what = f"{named(EXPERTS)} with precision={config.precision!r}"
        required = f"1, or tensor_model_parallel_size={tp}, because an engine's experts stay on its tensor-parallel ranks"
        yield ConfigError(explain(what, required=required, found=ep, fix="set it to one of the two"))


def _given(select: Callable[[str], Any]) -> int:
    return int(select(EXPERTS) or 1)


# ---- The settings of verl beside ``measure_routes`` and ``router_replay``, and its router replay -
# Imports no torch: the driver checks them first.

_RETURN = f"{ROLLOUT}.enable_rollout_routing_replay"
_FSDP = "no replay of routes, which verl 0.9.1 has in its Megatron and VeOmni engines alone (its FSDP engine ignores them)"
_MEGATRON = "no replay of routes, because the plugin has no mixture of experts with Megatron"
_INSTEAD = "set it to disabled, and router_replay='R3' of jetrl_patch with FSDP"
_WHOLE = "full weights (the reference pass of a run with adapters has other weights than the rollout)"

#: verl's router replay (R2, R3), in every mode with a quantized rollout
_ROUTE_RULES: tuple[Rule, ...] = tuple(
    Rule(f"{ACTOR}.{engine}.router_replay.mode", other_than("disabled"), required, _INSTEAD, "quantized")
    for engine, required in (("fsdp_config", _FSDP), ("megatron", _MEGATRON))
)
_RETURNED = (
    Rule(_RETURN, is_set, _FSDP, "set it to false, or let the plugin ask (measure_routes, router_replay)", "quantized"),
)
_MEASURED: tuple[Rule, ...] = (
    Rule(f"{ACTOR}.strategy", other_than("fsdp", "fsdp2"), "fsdp or fsdp2", "set it to fsdp2, or ask for no routes", "all"),
    *(
        Rule(f"{MODEL}.{name}", bad, _WHOLE, "train full weights, or ask for no routes", "all")
        for name, bad in (("lora_rank", positive), ("lora.rank", positive), ("lora_adapter_path", is_set))
    ),
)


def beside(config: Config) -> str:
    """What messages call the setting that needs routes."""
    return "measure_routes=True" if config.router_replay == "none" else f"router_replay={config.router_replay!r}"


def problems(select: Callable[[str], Any], config: Config) -> Iterator[JetrlError]:
    """Yield an error for each setting by which routes would be replayed, or not be comparable.

    Args:
        select: returns verl's setting at a dotted path, None where it is missing.
    """
    yield from broken(_ROUTE_RULES if config.returns_routes else (*_ROUTE_RULES, *_RETURNED), select, config, named)
    if not config.returns_routes:
        return
    version = registry.rollout().routes_error(beside(config)) if config.quantized_rollout else None
    if version is not None:
        yield version
    yield from broken(_MEASURED, select, config, named, beside(config))
    for size, path in ulysses.sizes(select).items():
        required, fix = "whole sequences on each rank", "set it to 1, or ask for no routes"
        yield ConfigError(explain(f"{named(path)} with {beside(config)}", required=required, found=str(size), fix=fix))


def wanted(config: Config) -> dict[str, Any]:
    """Return the setting by which the rollout returns its routes: path -> value."""
    return {_RETURN: True} if config.returns_routes else {}


# ---- The settings of verl in which ``old_log_probs="rollout"`` cannot be right. Imports no torch: the driver checks them first

_BESIDE = "old_log_probs='rollout'"
_NO_SUM = "no sum over the vocabulary, which only the pass computes"
_COMPARED = "a policy loss for every update, which compares the log-probs"
_ONE_VERSION = "samples of one version of the weights, which only a synchronous trainer has"
_REPORTED = "naive, whose sync reports the comparison"


def _rule(path: str, bad: Callable[[Any], bool], required: str, value: str) -> Rule:
    return Rule(path, bad, required, f"set it to {value}, or use old_log_probs='recompute'", "all")


_RULES: tuple[Rule, ...] = (
    _rule(f"{ACTOR}.strategy", other_than("fsdp", "fsdp2"), "fsdp or fsdp2", "fsdp2"),
    _rule(f"{ACTOR}.calculate_sum_pi_squared", is_set, _NO_SUM, "false"),
    _rule(f"{ACTOR}.fsdp_config.router_replay.mode", other_than("disabled"), "no routes recorded by the pass", "disabled"),
    _rule(f"{ACTOR}.megatron.router_replay.mode", other_than("disabled"), "no routes recorded by the pass", "disabled"),
    _rule("distillation.enabled", is_set, _COMPARED, "false"),
    _rule("trainer.v1.trainer_mode", other_than("sync"), _ONE_VERSION, "sync"),
    _rule(f"{ROLLOUT}.checkpoint_engine.backend", other_than("naive"), _REPORTED, "naive"),
)


def chosen(select: Callable[[str], Any], asked: Config) -> Config:
    """Return the settings with the pass kept where the user left it open and verl's settings need it.

    Args:
        asked: the settings before they were resolved.
    """
    needed = asked.old_log_probs == "auto" and any(old_log_prob_problems(select, asked))
    return asked.replace(old_log_probs="recompute") if needed else asked


def old_log_prob_problems(select: Callable[[str], Any], config: Config) -> Iterator[JetrlError]:
    """Yield an error for each setting of verl that needs the pass, or in which nothing would check its absence."""
    if config.skips_old_pass:
        yield from broken(_RULES, select, config, named, _BESIDE)
