"""Cross-checks of the settings of rollout formats and scales. Imports no torch, because ``Config`` calls it early."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from jetrl_patch.errors import ConfigError

if TYPE_CHECKING:
    from jetrl_patch.config.derived import Derived

__all__ = ["check_scaling"]


def check_scaling(config: Derived) -> None:
    """Raise ConfigError if granularity, backend, smoothing or invariant scale is invalid or contradicts the precision."""
    mode = f"precision={config.precision!r}"
    if config.rollout_granularity != "block" and not config.mode.has_granularity:
        raise ConfigError(
            f"rollout_granularity={config.rollout_granularity!r} contradicts {mode}: {config.mode.one_granularity}"
        )
    if config.mode.backends and config.backend not in config.mode.backends:
        raise ConfigError(
            f"backend={config.backend!r} contradicts {mode}, whose products are not FP8. Use backend='auto', or 'torch' "
            "for the reference."
        )
    if config.smoothing is not None:
        alpha = _number("smoothing", config.smoothing)
        if not 0 <= alpha <= 1:
            raise ConfigError(f"smoothing={config.smoothing!r} must lie between 0 (off) and 1.")
        if alpha and not config.channelwise:
            raise ConfigError(
                f"smoothing={alpha:g} contradicts {mode} with scales per {config.rollout_granularity}: it needs scales per "
                f"channel and token. Use {_channelwise()}."
            )
        object.__setattr__(config, "smoothing", alpha)
    if config.invariant_scale is not None:
        scale = _number("invariant_scale", config.invariant_scale)
        if scale <= 0:
            raise ConfigError(f"invariant_scale={config.invariant_scale!r} must be above 0. QuRL uses 1.5.")
        if not config.quantized_rollout:
            raise ConfigError(
                f"invariant_scale={scale:g} contradicts {mode}: it enlarges updates relative to quantized weights, and this "
                "rollout is not quantized. Drop invariant_scale."
            )
        object.__setattr__(config, "invariant_scale", scale)


def _channelwise() -> str:
    """The settings that give scales per channel, as a phrase for a message."""
    from jetrl_patch.config.modes import MODES  # imported here, because this module is loaded while the package is

    choice = " with rollout_granularity='channel'"
    return " or ".join(
        repr(name) + (choice if mode.has_granularity else "")
        for name, mode in MODES.items()
        if any(found.granularity == "channel" for found in mode.formats)
    )


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ConfigError(f"{name}={value!r} must be a finite number.")
    return float(value)
