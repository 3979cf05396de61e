"""Mismatch metrics of a step, for the log.

Samples of an asynchronous rollout may be older than the trainer's weights. Equality is promised under the weights that made a
sample, so only the tokens of the trainer's current weights are held to it; the others measure how far the weights have moved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from jetrl_patch.correction.mismatch import Mismatch, Sums, sums
from jetrl_patch.correction.parts import merge

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Compared", "say_if_nothing", "step_metrics", "version_metrics"]

#: defaults for a step whose correction reports nothing
_UNCORRECTED = {"jetrl/clipped_fraction": 0.0, "jetrl/masked_fraction": 0.0}


class Compared:
    """What a step compared, batch by batch: all of its tokens, and those of the trainer's current weights."""

    def __init__(self) -> None:
        self._all: list[Sums] = []
        self._current: list[Sums] = []

    def add(self, trainer: Tensor, rollout: Tensor, mask: Tensor, current: Tensor) -> None:
        """Add log-probs [B, T] where ``mask`` counts. ``current`` is a bool [B]: made by the trainer's weights alone."""
        of_current = mask.bool() & current.unsqueeze(1).to(mask.device)
        everything = sums(trainer, rollout, mask)
        self._all.append(everything)
        self._current.append(everything if bool(current.all()) else sums(trainer, rollout, of_current))

    def figures(self) -> tuple[Mismatch, Mismatch]:
        """Return the mismatch of all tokens, and of those of the current weights."""
        return merge(Sums, self._all).figures(), merge(Sums, self._current).figures()


def version_metrics(found: Mismatch, of_current: Mismatch) -> dict[str, float]:
    """Return the share of tokens that other weights made, and how equal the rest is."""
    metrics = {"jetrl/stale_fraction": 1.0 - of_current.tokens / found.tokens if found.tokens else 0.0}
    if of_current.tokens:
        metrics["jetrl/bit_equal_fraction_current"] = of_current.bit_equal_fraction
    return metrics


def step_metrics(found: Mismatch, corrected: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of a step. Those of its correction override the defaults."""
    return {**found.as_metrics(), **_UNCORRECTED, **corrected}


def say_if_nothing(metrics: dict[str, Any], say: Callable[[str], None]) -> dict[str, Any]:
    """Return the metrics of a step for its log line; of a step that compared nothing, ``say`` so and add the figures of no token.

    These are NaN, so that no minimum over the steps passes for one over all of them.
    """
    if metrics.get("jetrl/tokens"):
        return metrics
    say("this step compared no log-prob of rollout and trainer: jetrl/tokens is 0, and the figures of the mismatch are NaN")
    return {**Sums().figures().as_metrics(), **metrics}
