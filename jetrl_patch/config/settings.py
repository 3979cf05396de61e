"""``Config``: the settings with their checks, which run before anything changes, and what follows from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jetrl_patch.config import checks
from jetrl_patch.config.fields import SETTINGS, Fields, from_text
from jetrl_patch.config.modes import MODES, Granularity, Mode, ResolvedAlign, RolloutFormat
from jetrl_patch.config.text import SWITCH, written
from jetrl_patch.correction.kinds import check_bounds
from jetrl_patch.errors import ConfigError, unknown
from jetrl_patch.monitor.settings import check_monitor
from jetrl_patch.precision.settings import check_precision
from jetrl_patch.scaling.settings import check_scaling

__all__ = ["Config"]


@dataclass(frozen=True, kw_only=True)
class Config(Fields):
    """The settings of a run, frozen and keyword-only. Every process of a run must have equal settings.

    The fields are the settings in ``jetrl_patch/config/fields.py``. Raises ConfigError for a value that is unknown or
    malformed, and for settings that contradict each other.
    """

    def __post_init__(self) -> None:
        for name, found in SETTINGS.items():
            value = getattr(self, name)
            if found.choices and not (value is None and found.default is None):
                checks.check_choice(name, value, found.choices)
        for name, found in SETTINGS.items():
            if found.form is SWITCH and not (getattr(self, name) is None and found.default is None):
                checks.check_switch(name, getattr(self, name))
        numbers = ("audit_fraction", "monitor_sqnr", "monitor_underflow")
        for name in (*numbers, *(() if self.guard_sqnr is None else ("guard_sqnr",))):
            self._keep(name, checks.number(name, getattr(self, name)))
        self._keep("exclude", checks.patterns(self.exclude))
        self._keep("sync_timeout", checks.seconds("sync_timeout", self.sync_timeout))
        self._keep("correction_bounds", check_bounds(self.correction, self.correction_bounds))
        checks.check_together(self)
        check_monitor(self)
        check_scaling(self)
        check_precision(self)

    def _keep(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

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
        """Whether the rollout's log-probs are a step's old ones, without a forward pass of the trainer."""
        return self.old_log_probs == "rollout" or (self.old_log_probs == "auto" and self.exact)

    @property
    def returns_routes(self) -> bool:
        """Whether the rollout returns the experts of each token of a mixture."""
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
        """The effective ``upstream_fixes``: whether to fix other projects' bugs, also those with which a run starts."""
        return not self.mode.only_measures if self.upstream_fixes is None else self.upstream_fixes

    def resolved(self) -> Config:
        """The settings in canonical form, with ``align`` set explicitly. Two configs are equivalent if these are equal."""
        fixes = None if self.fixes_upstream == (not self.mode.only_measures) else self.upstream_fixes
        align = None if self.resolved_align == "none" else self.resolved_align
        head = "auto" if self.head_dtype == "bfloat16" else self.head_dtype
        return dataclasses.replace(self, align=align, head_dtype=head, upstream_fixes=fixes)

    def replace(self, **overrides: Any) -> Config:
        """A copy with some fields changed. Raises ConfigError for an unknown field."""
        known = [f.name for f in dataclasses.fields(self)]
        wrong = sorted(set(overrides) - set(known))
        if wrong:
            raise ConfigError(unknown(f"setting {', '.join(wrong)}", wrong, known))
        return dataclasses.replace(self, **overrides)

    def to_env(self) -> dict[str, str]:
        """Variable -> text for every variable that ``from_env`` reads, so that no stale value survives."""
        from jetrl_patch import env  # here, because env imports the table of settings

        return {env.SWITCH: "1", **{found.variable: written(getattr(self, name)) for name, found in SETTINGS.items()}}

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, **overrides: Any) -> Config:
        """The settings of the ``JETRL_*`` variables in ``environ`` (default: ``os.environ``), with defaults for the rest.

        ``overrides`` are fields that override the variables. Raises ConfigError for an unknown field or variable.
        """
        from jetrl_patch import env

        return cls().replace(**{**from_text(env.read_fields(environ)), **overrides})
