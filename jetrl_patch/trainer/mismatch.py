"""Mismatch metrics of a step, for the log."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from jetrl_patch.correction.mismatch import Mismatch

__all__ = ["say_if_inexact", "step_metrics"]

logger = logging.getLogger(__name__)

#: defaults for a step whose correction reports nothing
_UNCORRECTED = {"jetrl/clipped_fraction": 0.0, "jetrl/masked_fraction": 0.0}


def step_metrics(found: Mismatch, corrected: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of a step. Those of its correction override the defaults."""
    return {**found.as_metrics(), **_UNCORRECTED, **corrected}


def say_if_inexact(found: Mismatch, exact: bool) -> None:
    """Log an error if the mode promises equality and a token differs."""
    if exact and found.tokens and found.bit_equal_fraction != 1.0:
        logger.error(
            "jetrl_patch: exact mode is not exact: %.4f of %d tokens bit-equal, mean |dlogp| %.3e, max %.3e",
            found.bit_equal_fraction,
            found.tokens,
            found.logp_abs_diff_mean,
            found.logp_abs_diff_max,
        )
