"""The settings of verl's asynchronous trainers: what is refused, and why the rest changes no bit. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jetrl_patch.adapters.verl.yaml_settings import named
from jetrl_patch.config import Config
from jetrl_patch.errors import UNQUANTIZED, ConfigError, JetrlError, explain
from jetrl_patch.trainer.rules import Rule, broken, is_set

__all__ = ["HARMLESS", "RULES", "problems"]

#: the sections of verl's configuration that only asynchronous trainers read
PROGRAM, TOGETHER, APART = "async_training", "trainer.v1.colocate_async", "trainer.v1.separate_async"
_SWITCH = f"{APART}.hybrid_rollout"

RULES: tuple[Rule, ...] = tuple(
    Rule(path, is_set, "a rollout that stays on its own devices", "set it to false", "all")
    for path in (
        f"{PROGRAM}.use_trainer_do_validate",
        f"{PROGRAM}.use_dynamic_resource_scheduling",
        f"{_SWITCH}.enable_switch",
    )
)

_WHEN = "it decides when samples are made and weights are sent, and a sample carries the version of its weights"
_LENDING = "it is read only where the trainer's devices are lent to the rollout, which is refused"

#: every other setting of these sections -> why it is harmless
HARMLESS: dict[str, str] = {
    **dict.fromkeys(
        (
            f"{PROGRAM}.staleness_threshold", f"{PROGRAM}.trigger_parameter_sync_step", f"{PROGRAM}.require_batches",
            f"{TOGETHER}.num_warmup_batches", f"{APART}.num_warmup_batches", f"{APART}.parameter_sync_step",
        ),
        _WHEN,
    ),
    f"{PROGRAM}.partial_rollout": "a sample that spans a sync carries both versions and counts as stale",
    f"{PROGRAM}.concurrent_samples_per_replica": "a token's bits do not depend on the requests beside it",
    **dict.fromkeys(
        (
            f"{PROGRAM}.dynamic_schedule_policy", f"{PROGRAM}.dynamic_schedule_deactivate_ratio",
            f"{PROGRAM}.dynamic_schedule_enable_rebalance", f"{_SWITCH}.switch_threshold_ratio",
            f"{_SWITCH}.adaptive_switch_threshold", f"{_SWITCH}.switch_threshold_step_up",
            f"{_SWITCH}.switch_threshold_step_down", f"{_SWITCH}.switch_threshold_release_steps",
            f"{_SWITCH}.switch_cost_window_size",
        ),
        _LENDING,
    ),
}  # fmt: skip


def problems(select: Callable[[str], Any], config: Config) -> Iterator[JetrlError]:
    """Yield an error for each setting that lends devices and, with a quantized rollout, for each that nobody has examined."""
    yield from broken(RULES, select, config, named)
    if not config.quantized_rollout:
        return
    known = {*HARMLESS, *(rule.path for rule in RULES)}
    for section in (PROGRAM, TOGETHER, APART):
        for path, value in _leaves(section, select(section)):
            if path not in known:
                what, required = f"{named(path)} with precision={config.precision!r}", "a setting of a supported verl"
                yield ConfigError(explain(what, required=required, found=repr(value), fix=f"remove it, or use {UNQUANTIZED}"))


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield each setting below a path; hydra's own keys begin with an underscore."""
    if not isinstance(value, Mapping):
        if value is not None:
            yield path, value
        return
    for name, below in value.items():
        if not str(name).startswith("_"):
            yield from _leaves(f"{path}.{name}", below)
