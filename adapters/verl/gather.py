"""The FP8 all-gather in verl's FSDP2 engine: mark the weights, and refuse the other strategies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from jetrl_patch.adapters.verl.paths import ACTOR, REF, named
from jetrl_patch.config import Config
from jetrl_patch.errors import ConfigError, JetrlError, explain
from jetrl_patch.trainer.rules import Rule, broken, other_than

#: one process builds both engines from these settings
_STRATEGIES = (f"{ACTOR}.strategy", f"{REF}.strategy")
_RULES = tuple(Rule(path, other_than("fsdp2"), "fsdp2 for fp8_all_gather", "set it to fsdp2", "all") for path in _STRATEGIES)


def problems(select: Callable[[str], Any], config: Config) -> Iterator[JetrlError]:
    """Yield an error for each strategy other than FSDP2."""
    if config.fp8_all_gather:
        yield from broken(_RULES, select, config, named)


def mark_layers(engine: Any, module: Any, layers: list[str], config: Config) -> None:
    """Mark the weights that ``engine`` gathers in FP8, after conversion and before ``fully_shard``.

    Raises ConfigError for an engine that is not FSDP2.
    """
    if not config.fp8_all_gather:
        return
    from jetrl_patch.fp8.gathered_layers import gather_in_fp8

    strategy = engine.engine_config.strategy
    if strategy != "fsdp2":
        fix = "set strategy=fsdp2, or fp8_all_gather=False"
        raise ConfigError(
            explain("verl's engine with fp8_all_gather=True", required="strategy fsdp2", found=repr(strategy), fix=fix)
        )
    gather_in_fp8(module, layers, engine.device_mesh.size(-1))
