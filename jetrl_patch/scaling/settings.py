"""The settings of rollout formats and scales, judged together. Imports no torch: ``Config`` asks before anything starts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from jetrl_patch.errors import ConfigError

if TYPE_CHECKING:
    from jetrl_patch.config import Config

__all__ = ["DEFAULT_SMOOTHING", "check_scaling"]

#: of ``int8-rollout``; measured in docs/precisions.md
DEFAULT_SMOOTHING = 0.5


def check_scaling(config: Config) -> None:
    """Raise ConfigError where a granularity, smoothing, invariant scale or INT8 backend contradicts the precision."""
    mode = f"precision={config.precision!r}"
    if config.rollout_granularity != "block" and config.precision != "fp8-rollout":
        why = {
            "int8-rollout": "INT8 always has one scale per output channel; drop it",
            "fp8-unified": "the trainer's FP8 flow has 128-blocks, and the rollout must have the same; use "
            "precision='fp8-rollout' or rollout_granularity='block'",
        }.get(config.precision, "only 'fp8-rollout' has a choice of scales; drop it")
        raise ConfigError(f"rollout_granularity={config.rollout_granularity!r} contradicts {mode}: {why}")
    if config.precision == "int8-rollout" and config.backend not in ("auto", "torch"):
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
                f"for scales per channel and token; use 'int8-rollout', or 'fp8-rollout' with rollout_granularity='channel'"
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


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ConfigError(f"{name}={value!r} must be a finite number")
    return float(value)
