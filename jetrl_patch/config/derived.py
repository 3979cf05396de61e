"""Properties derived from the settings and the table of precisions."""

from __future__ import annotations

from dataclasses import dataclass

from jetrl_patch.config.fields import Fields
from jetrl_patch.config.modes import MODES, Granularity, Mode, ResolvedAlign, RolloutFormat

__all__ = ["Derived"]


@dataclass(frozen=True, kw_only=True)
class Derived(Fields):
    """The settings, unchecked, with the derived properties that the rest of the plugin reads."""

    @property
    def mode(self) -> Mode:
        """The record of the precision."""
        return MODES[self.precision]

    @property
    def format(self) -> RolloutFormat | None:
        """The format of the rollout's linears; None if they are not quantized."""
        return self.mode.format(self.rollout_granularity)

    @property
    def resolved_align(self) -> ResolvedAlign:
        """The effective ``align``: ``"exact"``, ``"linear"`` or ``"none"``."""
        return self.mode.align if self.align is None else self.align

    @property
    def quantized_rollout(self) -> bool:
        """Whether the rollout's linears are quantized."""
        return self.mode.quantizes

    @property
    def channelwise(self) -> bool:
        """Whether the rollout has one scale per output channel and token."""
        return self.granularity == "channel"

    @property
    def granularity(self) -> Granularity:
        """The granularity of the rollout's scales; ``rollout_granularity`` if its linears are not quantized."""
        return self.rollout_granularity if self.format is None else self.format.granularity

    @property
    def resolved_smoothing(self) -> float:
        """The effective ``smoothing``; 0 is off."""
        return self.mode.smoothing if self.smoothing is None else self.smoothing

    @property
    def fp32_head(self) -> bool:
        """Whether both sides compute logits in FP32."""
        return self.head_dtype == "float32"

    @property
    def same_log_probs(self) -> bool:
        """Whether the trainer computes log-probs by the rollout's formula, in FP32."""
        return self.exact or self.mode.rollout_log_probs

    @property
    def skips_old_pass(self) -> bool:
        """Whether the rollout's log-probs serve as a step's old ones, so that the trainer skips its forward pass for them."""
        return self.old_log_probs == "rollout" or (self.old_log_probs == "auto" and self.exact)

    @property
    def returns_routes(self) -> bool:
        """Whether the rollout returns the experts that it chose for each token."""
        return self.measure_routes or self.router_replay != "none"

    @property
    def compute_dtype(self) -> str:
        """torch's name of the 16-bit dtype on both sides."""
        return self.mode.dtype

    @property
    def fp8_rollout(self) -> bool:
        """Whether the rollout's linears are FP8."""
        return self.format is not None and self.format.is_fp8

    @property
    def fp8_train(self) -> bool:
        """Whether the trainer's linears are FP8."""
        return self.mode.trains_fp8

    @property
    def exact(self) -> bool:
        """Whether trainer and rollout must be bit-equal."""
        return self.resolved_align == "exact"

    @property
    def fixes_upstream(self) -> bool:
        """The effective ``upstream_fixes``: whether to fix bugs of other projects that do not keep a run from starting."""
        return not self.mode.only_measures if self.upstream_fixes is None else self.upstream_fixes
