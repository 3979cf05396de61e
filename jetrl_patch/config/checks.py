"""What can be wrong about one setting by itself, and about settings that no part of the project owns."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, cast

from jetrl_patch.config.modes import MODES
from jetrl_patch.correction.kinds import CORRECTIONS
from jetrl_patch.errors import ConfigError

if TYPE_CHECKING:
    from jetrl_patch.config.settings import Config

__all__ = ["check_choice", "check_switch", "check_together", "number", "patterns", "seconds"]


def check_choice(name: str, value: object, allowed: Sequence[str]) -> None:
    """Raise ConfigError for anything but one of a few words."""
    if not isinstance(value, str) or value not in allowed:
        raise ConfigError(f"unknown {name} {value!r}; it must be one of {', '.join(map(repr, allowed))}")


def check_switch(name: str, value: object) -> None:
    """Raise ConfigError for anything but True and False."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r} must be True or False")


def number(name: str, value: object) -> float:
    """A finite number. Raises ConfigError for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ConfigError(f"{name}={value!r} must be a finite number")
    return float(value)


def seconds(name: str, value: object) -> float:
    """A duration. Raises ConfigError for what is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise ConfigError(f"{name}={value!r} must be a positive, finite number of seconds")
    return float(value)


def patterns(value: object) -> tuple[str, ...]:
    """``exclude`` as a tuple. Raises ConfigError for what is no list of name patterns."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ConfigError(f"exclude={value!r} must be a list of patterns; write ({value!r},) for a single one")
    found = tuple(value)
    for pattern in found:
        if not isinstance(pattern, str):
            raise ConfigError(f"exclude has {pattern!r}, which is not text; patterns look like 'layers.0' or 'mlp.*'")
        if not pattern or any(part == "" for part in pattern.split(".")):
            raise ConfigError(
                f"exclude has {pattern!r}, with an empty name part; patterns look like 'layers.0' or 'mlp.*'"
            )
        if "," in pattern or any(char.isspace() for char in pattern):
            raise ConfigError(f"exclude has {pattern!r}, with a comma or a blank; give one pattern per entry")
    return cast("tuple[str, ...]", found)


def check_together(config: Config) -> None:
    """Raise ConfigError for settings that contradict each other."""
    unified = " or ".join(repr(name) for name, mode in MODES.items() if mode.is_unified)
    if config.align is not None and not config.mode.is_unified:
        raise ConfigError(
            f"align={config.align!r} contradicts precision={config.precision!r}: only {unified} has the same "
            f"linears on both sides, and without them nothing can agree; drop align or use {unified}"
        )
    if config.fp8_all_gather and not config.fp8_train:
        raise ConfigError(
            f"fp8_all_gather=True contradicts precision={config.precision!r}: only {unified} trains with FP8 "
            f"weights; leave it off or use {unified}"
        )
    below = [name for name, found in CORRECTIONS.items() if found.takes_acr]
    if config.acr and config.correction not in below:
        raise ConfigError(
            f"acr=True with correction={config.correction!r}: the adaptive clipping range makes up for what a token's "
            f"ratio is truncated by; set correction={' or '.join(map(repr, below))} or drop acr"
        )
    if config.optimizer_states != "fp32" and config.fp8_all_gather:
        raise ConfigError(
            f"optimizer_states={config.optimizer_states!r} contradicts fp8_all_gather=True: its weights are tensors of "
            f"their own kind, which the 8-bit update was not tried on; leave one of them out"
        )
