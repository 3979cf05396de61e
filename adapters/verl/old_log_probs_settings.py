"""The settings of verl in which ``old_log_probs="rollout"`` cannot be right. Imports no torch: the driver checks them first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from jetrl_patch.adapters.verl.paths import ACTOR, ROLLOUT, named
from jetrl_patch.config import Config
from jetrl_patch.errors import JetrlError
from jetrl_patch.trainer.rules import Rule, broken, is_set, other_than

__all__ = ["chosen", "problems"]

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
    needed = asked.old_log_probs == "auto" and any(problems(select, asked))
    return asked.replace(old_log_probs="recompute") if needed else asked


def problems(select: Callable[[str], Any], config: Config) -> Iterator[JetrlError]:
    """Yield an error for each setting of verl that needs the pass, or in which nothing would check its absence."""
    if config.skips_old_pass:
        yield from broken(_RULES, select, config, named, _BESIDE)
