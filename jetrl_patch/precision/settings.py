"""Check ``kv_cache`` and ``head_dtype`` before anything starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jetrl_patch.errors import ConfigError, explain

if TYPE_CHECKING:
    from jetrl_patch.config.derived import Derived

__all__ = ["check_precision"]


def check_precision(config: Derived) -> None:
    """Raise ConfigError if these settings contradict ``align`` or ``precision``."""
    if config.kv_cache == "fp8" and config.exact:
        raise ConfigError(
            explain(
                "kv_cache='fp8' with align='exact'",
                required="a trainer whose attention equals the rollout's",
                found="keys and values that only the rollout rounds to FP8",
                fix="drop kv_cache, or use align='linear'",
            )
        )
    if config.head_dtype not in ("auto", "float32", config.compute_dtype):
        raise ConfigError(
            explain(
                f"head_dtype={config.head_dtype!r} with precision={config.precision!r}",
                required="one 16-bit format",
                found="two",
                fix=f"leave head_dtype at 'auto', which is {config.compute_dtype} here, or use 'float32'",
            )
        )
