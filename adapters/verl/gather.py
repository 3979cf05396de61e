"""The FP8 all-gather in verl's FSDP2 engine: who is marked for it, and which strategies have none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from jetrl_patch.adapters.verl.paths import ACTOR, REF, named
from jetrl_patch.config import Config
from jetrl_patch.errors import ConfigError, JetrlError
from jetrl_patch.trainer.rules import Rule, broken, other_than

#: both engines are built in one process from these
_STRATEGIES = (f"{ACTOR}.strategy", f"{REF}.strategy")
_RULES = tuple(Rule(path, other_than("fsdp2"), "fsdp2 for fp8_all_gather", "use it", "all") for path in _STRATEGIES)


def problems(select: Callable[[str], Any], config: Config) -> Iterator[JetrlError]:
    """Strategies that gather weights in a way of their own."""
    if config.fp8_all_gather:
        yield from broken(_RULES, select, config, named)


def mark_layers(engine: Any, module: Any, layers: list[str], config: Config) -> None:
    """After conversion and before ``fully_shard``: the weights that ``engine`` will gather in FP8.

    Raises ConfigError for an engine that is not FSDP2.
    """
    if not config.fp8_all_gather:
        return
    from jetrl_patch.fp8.gathered_layers import gather_in_fp8

    strategy = engine.engine_config.strategy
    if strategy != "fsdp2":
        raise ConfigError(f"fp8_all_gather=True needs verl's strategy fsdp2, found {strategy!r}; use fsdp2 or leave it off")
    gather_in_fp8(module, layers, engine.device_mesh.size(-1))
