"""Checks of single settings, and of combinations that belong to no other module."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, cast

from jetrl_patch.config.modes import MODES
from jetrl_patch.correction.kinds import CORRECTIONS
from jetrl_patch.errors import ConfigError, explain

if TYPE_CHECKING:
    from jetrl_patch.config.derived import Derived

__all__ = ["check_choice", "check_switch", "check_together", "number", "patterns", "seconds"]


def check_choice(name: str, value: object, allowed: Sequence[str]) -> None:
    """Raise ConfigError if the value is not one of the allowed words."""
    if not isinstance(value, str) or value not in allowed:
        raise ConfigError(f"unknown {name} {value!r}. Set it to one of {', '.join(map(repr, allowed))}.")


def check_switch(name: str, value: object) -> None:
    """Raise ConfigError if the value is not a bool."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r} must be True or False.")


def number(name: str, value: object) -> float:
    """The value as a finite float. Raises ConfigError for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ConfigError(f"{name}={value!r} must be a finite number.")
    return float(value)


def seconds(name: str, value: object) -> float:
    """The value as a positive duration in seconds. Raises ConfigError for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise ConfigError(f"{name}={value!r} must be a positive, finite number of seconds.")
    return float(value)


def patterns(value: object) -> tuple[str, ...]:
    """``exclude`` as a tuple. Raises ConfigError if it is not a list of name patterns."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ConfigError(f"exclude={value!r} must be a list of patterns. Write ({value!r},) for a single one.")
    found = tuple(value)
    for pattern in found:
        if not isinstance(pattern, str):
            raise ConfigError(_bad_pattern(pattern, "not a string"))
        if not pattern or any(part == "" for part in pattern.split(".")):
            raise ConfigError(_bad_pattern(pattern, "with an empty name part"))
        if "," in pattern or any(char.isspace() for char in pattern):
            raise ConfigError(_bad_pattern(pattern, "with a comma or a blank"))
    return cast("tuple[str, ...]", found)


def _bad_pattern(pattern: object, why: str) -> str:
    return explain(
        "exclude",
        required="patterns such as 'layers.0' or 'mlp.*'",
        found=f"{pattern!r}, {why}",
        fix="give one pattern per entry",
    )


def check_together(config: Derived) -> None:
    """Raise ConfigError if settings contradict each other."""
    unified = " or ".join(repr(name) for name, mode in MODES.items() if mode.is_unified)
    if config.align is not None and not config.mode.is_unified:
        raise ConfigError(
            f"align={config.align!r} contradicts precision={config.precision!r}: only {unified} has the same "
            f"linears on both sides. Drop align or use {unified}."
        )
    if config.fp8_all_gather and not config.fp8_train:
        raise ConfigError(
            f"fp8_all_gather=True contradicts precision={config.precision!r}: only {unified} trains with FP8 "
            f"weights. Drop fp8_all_gather or use {unified}."
        )
    if config.sync == "delta" and not config.quantized_rollout:
        raise ConfigError(
            f"sync='delta' contradicts precision={config.precision!r}: without a quantized rollout the framework itself "
            "sends the weights. Drop sync or choose a precision that quantizes the rollout."
        )
    if config.old_log_probs == "rollout" and not config.exact:
        raise ConfigError(
            f"old_log_probs='rollout' contradicts align={config.resolved_align!r}: only in exact mode are the rollout's "
            "log-probs the trainer's. Set align='exact' or old_log_probs='recompute'."
        )
    if config.router_replay != "none" and config.exact:
        raise ConfigError(
            f"router_replay={config.router_replay!r} contradicts align='exact': there both sides choose the same experts. "
            "Drop router_replay or use align='linear'."
        )
    if config.router_replay != "none" and not config.fp8_rollout:
        raise ConfigError(
            f"router_replay={config.router_replay!r} contradicts precision={config.precision!r}: routes are replayed from an FP8 "
            "rollout alone. Drop router_replay or use precision='fp8-rollout'."
        )
    if config.decode_graphs and not config.exact:
        raise ConfigError(
            f"decode_graphs=True contradicts align={config.resolved_align!r}: outside of exact mode vLLM captures graphs by "
            "itself. Drop decode_graphs or use align='exact'."
        )
    if config.decode_graphs and config.guard_sqnr is not None:
        raise ConfigError(
            f"decode_graphs=True contradicts guard_sqnr={config.guard_sqnr!r}: a graph would keep running layers that have left "
            "FP8. Drop one of the two."
        )
    if not 0 <= config.audit_fraction <= 1:
        raise ConfigError(f"audit_fraction={config.audit_fraction!r} must be between 0 and 1.")
    below = [name for name, found in CORRECTIONS.items() if found.takes_acr]
    if config.acr and config.correction not in below:
        raise ConfigError(
            f"acr=True with correction={config.correction!r}: the adaptive clipping range compensates for truncated token "
            f"ratios, and this correction truncates none. Set correction={' or '.join(map(repr, below))} or drop acr."
        )
    if config.optimizer_states != "fp32" and config.fp8_all_gather:
        raise ConfigError(
            f"optimizer_states={config.optimizer_states!r} contradicts fp8_all_gather=True: the 8-bit update has not been "
            f"tested on the tensor subclass of the gathered weights. Drop one of the two."
        )
