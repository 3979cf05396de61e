"""Optimizer states in verl: its setting for the optimizer class names the plugin's class. FSDP only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jetrl_patch.adapters.verl.paths import ACTOR, named
from jetrl_patch.config import Config
from jetrl_patch.errors import ConfigError, ConflictError, JetrlError, explain
from jetrl_patch.optim.settings import CLASSES, MODULE, check_installed, check_options

__all__ = ["problems", "wanted"]

_CRITIC = "critic"
_STRATEGIES = ("fsdp", "fsdp2")


def problems(select: Callable[[str], Any], config: Config) -> Iterator[JetrlError]:
    """Yield an error for each setting in verl's configuration that contradicts ``optimizer_states``."""
    states = config.optimizer_states
    if states == "fp32":
        return
    try:
        check_installed(states)
    except JetrlError as error:
        yield error
    for section in _sections(select):
        strategy = select(f"{section}.strategy")
        if strategy not in _STRATEGIES:
            yield ConfigError(
                explain(
                    f"{named(section)}.strategy with optimizer_states={states!r}",
                    required=" or ".join(_STRATEGIES),
                    found=repr(strategy),
                    fix="set it to fsdp2, or leave optimizer_states at 'fp32' (Megatron has its own exp_avg_dtype)",
                )
            )
            continue
        chosen = (select(f"{section}.optim.optimizer_impl"), select(f"{section}.optim.optimizer"))
        if chosen not in ((None, None), ("torch.optim", "AdamW"), (MODULE, CLASSES[states])):
            yield ConflictError(
                explain(
                    f"{named(section)}.optim with optimizer_states={states!r}",
                    required="verl's default, torch.optim.AdamW",
                    found=".".join(map(str, chosen)),
                    fix="remove optimizer and optimizer_impl, or leave optimizer_states at 'fp32'",
                )
            )
        options = select(f"{section}.optim.override_optimizer_config")
        try:
            check_options(states, options or {}, named(f"{section}.optim.override_optimizer_config"))
        except JetrlError as error:
            yield error


def wanted(select: Callable[[str], Any], config: Config) -> Mapping[str, Any]:
    """Return the settings that verl's configuration needs; none for FP32 states."""
    if config.optimizer_states == "fp32":
        return {}
    found = {}
    for section in _sections(select):
        found[f"{section}.optim.optimizer_impl"] = MODULE
        found[f"{section}.optim.optimizer"] = CLASSES[config.optimizer_states]
    return found


def _sections(select: Callable[[str], Any]) -> list[str]:
    """Return the actor's section, and the critic's unless it is disabled."""
    critic = select(f"{_CRITIC}.optim") is not None and select(f"{_CRITIC}.enable") is not False
    return [ACTOR, _CRITIC] if critic else [ACTOR]
