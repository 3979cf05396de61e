"""The settings of rollout formats and scales, judged together. Imports no torch: ``Config`` asks before anything starts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from jetrl_patch.errors import ConfigError

if TYPE_CHECKING:
    from jetrl_patch.config import Config

__all__ = ["check_scaling"]


def check_scaling(config: Config) -> None:
    """Raise ConfigError where a granularity, smoothing, invariant scale or backend contradicts the precision."""
    mode = f"precision={config.precision!r}"
    if config.rollout_granularity != "block" and not config.mode.has_granularity:
        raise ConfigError(
            f"rollout_granularity={config.rollout_granularity!r} contradicts {mode}: {config.mode.one_granularity}"
        )
    if config.mode.backends and config.backend not in config.mode.backends:
        raise ConfigError(
            f"backend={config.backend!r} contradicts {mode}: it computes FP8 products; use backend='auto', or 'torch' for "
            f"the reference"
        )
    if config.smoothing is not None:
        alpha = _number("smoothing", config.smoothing)
        if not 0 <= alpha <= 1:
            raise ConfigError(f"smoothing={config.smoothing!r} must lie between 0 (off) and 1")
        if alpha and not config.channelwise:
            raise ConfigError(
                f"smoothing={alpha:g} contradicts {mode} with scales per {config.rollout_granularity}: it prepares a model "
                f"for scales per channel and token; use {_channelwise()}"
            )
        object.__setattr__(config, "smoothing", alpha)
    if config.invariant_scale is not None:
        scale = _number("invariant_scale", config.invariant_scale)
        if scale <= 0:
            raise ConfigError(f"invariant_scale={config.invariant_scale!r} must be above 0; QuRL's is 1.5")
        if not config.quantized_rollout:
            raise ConfigError(
                f"invariant_scale={scale:g} contradicts {mode}: it makes updates weigh more against a quantized rollout, "
                f"and this one is not quantized; drop it"
            )
        object.__setattr__(config, "invariant_scale", scale)


def _channelwise() -> str:
    """The modes that can have such scales, in words."""
    from jetrl_patch.config.modes import MODES  # here, because the settings are checked while their package is imported

    choice = " with rollout_granularity='channel'"
    return " or ".join(
        repr(name) + (choice if mode.has_granularity else "")
        for name, mode in MODES.items()
        if any(found.granularity == "channel" for found in mode.formats)
    )


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ConfigError(f"{name}={value!r} must be a finite number")
    return float(value)
