"""The settings of verl in which ``old_log_probs="rollout"`` cannot be right. Imports no torch: the driver checks them first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from jetrl_patch.adapters.verl.paths import ACTOR, ROLLOUT, named
from jetrl_patch.config import Config
from jetrl_patch.errors import ConfigError, JetrlError, explain
from jetrl_patch.trainer.rules import is_set, other_than

__all__ = ["problems"]

#: path, whether a value is refused, what is required, what to do
_RULES: tuple[tuple[str, Callable[[Any], bool], str, str], ...] = (
    (f"{ACTOR}.strategy", other_than("fsdp", "fsdp2"), "fsdp or fsdp2", "set it to fsdp2"),
    (f"{ACTOR}.calculate_sum_pi_squared", is_set, "no sum over the vocabulary, which only the pass computes", "set it to false"),
    *(
        (f"{ACTOR}.{engine}.router_replay.mode", other_than("disabled"), "no routes recorded by the pass", "set it to disabled")
        for engine in ("fsdp_config", "megatron")
    ),
    ("distillation.enabled", is_set, "a policy loss for every update, which compares the log-probs", "set it to false"),
    (f"{ROLLOUT}.checkpoint_engine.backend", other_than("naive"), "naive, whose sync reports the comparison", "set it to naive"),
)  # fmt: skip


def problems(select: Callable[[str], Any], config: Config) -> Iterator[JetrlError]:
    """Yield an error for each setting of verl that needs the pass, or in which nothing would check its absence."""
    if not config.skips_old_pass:
        return
    for path, is_refused, required, fix in _RULES:
        value = select(path)
        if value is not None and is_refused(value):
            what = f"{named(path)} with old_log_probs='rollout'"
            fix = f"{fix}, or use old_log_probs='recompute'"
            yield ConfigError(explain(what, required=required, found=repr(value), fix=fix))
