"""What can be wrong about ``kv_cache`` and ``head_dtype``, said before anything starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jetrl_patch.errors import ConfigError, explain

if TYPE_CHECKING:
    from jetrl_patch.config import Config

__all__ = ["check_precision"]


def check_precision(config: Config) -> None:
    """Raise ConfigError for settings that contradict each other."""
    if config.kv_cache == "fp8" and config.exact:
        raise ConfigError(
            explain(
                "kv_cache='fp8' with align='exact'",
                required="a trainer whose attention equals the rollout's",
                found="keys and values that the rollout alone rounds to FP8",
                fix="drop kv_cache, or use align='linear'",
            )
        )
    if config.head_dtype == "bfloat16" and config.precision == "fp16":
        raise ConfigError(
            explain(
                "head_dtype='bfloat16' with precision='fp16'",
                required="one 16-bit format",
                found="two",
                fix="leave head_dtype at 'auto', which is float16 here, or use 'float32'",
            )
        )
