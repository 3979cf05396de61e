"""Checks of the monitor's and the guard's settings, made before anything starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jetrl_patch.errors import ConfigError

if TYPE_CHECKING:
    from jetrl_patch.config.derived import Derived

__all__ = ["check_monitor"]


def check_monitor(config: Derived) -> None:
    """Raise ConfigError for meaningless thresholds and for a guard that cannot act."""
    every, share, guard = config.monitor_every, config.monitor_underflow, config.guard_sqnr
    if isinstance(every, bool) or not isinstance(every, int) or every < 0:
        raise ConfigError(f"monitor_every={every!r} must be a whole number of steps. Set it to 0 to turn the monitor off.")
    if not 0 <= share <= 1:
        raise ConfigError(f"monitor_underflow={share!r} must be between 0 and 1.")
    if guard is None:
        return
    if not every:
        raise ConfigError("guard_sqnr needs the monitor's measurements. Set monitor_every to 1 or more.")
    if not config.fp8_train:
        raise ConfigError(
            f"guard_sqnr={guard!r} contradicts precision={config.precision!r}: the guard moves layers from FP8 to BF16 "
            f"on both sides, and this mode does not have FP8 on both. Unset guard_sqnr."
        )
    if config.backend == "te":
        raise ConfigError(
            f"guard_sqnr={guard!r} contradicts backend='te': TransformerEngine layers cannot leave FP8 one by one. "
            f"Unset one of the two."
        )
    if config.fp8_all_gather:
        raise ConfigError(
            f"guard_sqnr={guard!r} contradicts fp8_all_gather=True: a layer that leaves FP8 needs its weight in BF16, "
            f"and FSDP2 gathers only FP8 bytes. Unset one of the two."
        )
