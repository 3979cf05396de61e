"""The settings of verl beside ``measure_routes`` and ``router_replay``, and its router replay.

Imports no torch: the driver checks them first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from jetrl_patch import registry
from jetrl_patch.adapters.verl import ulysses
from jetrl_patch.adapters.verl.paths import ACTOR, MODEL, ROLLOUT, named
from jetrl_patch.config import Config
from jetrl_patch.errors import ConfigError, JetrlError, explain
from jetrl_patch.trainer.rules import Rule, broken, is_set, other_than, positive

__all__ = ["beside", "problems", "wanted"]

_RETURN = f"{ROLLOUT}.enable_rollout_routing_replay"
_FSDP = "no replay of routes, which verl 0.9.1 has in its Megatron and VeOmni engines alone (its FSDP engine ignores them)"
_MEGATRON = "no replay of routes, because the plugin has no mixture of experts with Megatron"
_INSTEAD = "set it to disabled, and router_replay='R3' of jetrl_patch with FSDP"
_WHOLE = "full weights (the reference pass of a run with adapters has other weights than the rollout)"

#: verl's router replay (R2, R3), in every mode with a quantized rollout
_RULES: tuple[Rule, ...] = tuple(
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
    yield from broken(_RULES if config.returns_routes else (*_RULES, *_RETURNED), select, config, named)
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
