"""The optimizer's states in verl: its own setting for an optimizer's class names ours; FSDP only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jetrl_patch.config import Config
from jetrl_patch.errors import ConfigError, ConflictError, JetrlError, explain
from jetrl_patch.optim.settings import CLASSES, MODULE, check_installed, check_options

__all__ = ["problems", "wanted"]

#: section -> where its strategy stands
_TRAINED = {"actor_rollout_ref.actor": "strategy", "critic": "strategy"}
_STRATEGIES = ("fsdp", "fsdp2")


def problems(select: Callable[[str], Any], config: Config) -> Iterator[JetrlError]:
    """What stands against ``optimizer_states`` in verl's configuration, as the errors to raise."""
    states = config.optimizer_states
    if states == "fp32":
        return
    try:
        check_installed(states)
    except JetrlError as error:
        yield error
    for section in _sections(select):
        strategy = select(f"{section}.{_TRAINED[section]}")
        if strategy not in _STRATEGIES:
            yield ConfigError(
                explain(
                    f"verl setting {section}.strategy with optimizer_states={states!r}",
                    asked=" or ".join(_STRATEGIES),
                    found=repr(strategy),
                    fix="use one of them, or leave optimizer_states at 'fp32' (Megatron has exp_avg_dtype of its own)",
                )
            )
            continue
        named = (select(f"{section}.optim.optimizer_impl"), select(f"{section}.optim.optimizer"))
        if named not in ((None, None), ("torch.optim", "AdamW"), (MODULE, CLASSES[states])):
            yield ConflictError(
                explain(
                    f"verl setting {section}.optim with optimizer_states={states!r}",
                    asked="verl's default, torch.optim.AdamW",
                    found=".".join(map(str, named)),
                    fix="leave optimizer and optimizer_impl out, or optimizer_states at 'fp32'",
                )
            )
        options = select(f"{section}.optim.override_optimizer_config")
        try:
            check_options(states, options or {}, f"verl setting {section}.optim.override_optimizer_config")
        except JetrlError as error:
            yield error


def wanted(select: Callable[[str], Any], config: Config) -> Mapping[str, Any]:
    """What verl's configuration has to say; nothing for FP32 states."""
    if config.optimizer_states == "fp32":
        return {}
    found = {}
    for section in _sections(select):
        found[f"{section}.optim.optimizer_impl"] = MODULE
        found[f"{section}.optim.optimizer"] = CLASSES[config.optimizer_states]
    return found


def _sections(select: Callable[[str], Any]) -> list[str]:
    """The actor, and the critic unless it is switched off."""
    critic = select("critic.optim") is not None and select("critic.enable") is not False
    return [name for name in _TRAINED if name != "critic" or critic]
