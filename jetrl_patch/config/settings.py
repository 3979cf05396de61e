"""``Config``: the settings, checked when they are created and before anything changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jetrl_patch.config import checks
from jetrl_patch.config.checks import Derived, check_monitor, check_precision, check_scaling
from jetrl_patch.config.corrections import check_bounds
from jetrl_patch.config.fields import AUTO_SWITCH, SETTINGS, SWITCH, from_text, written
from jetrl_patch.errors import ConfigError, unknown

__all__ = ["Config"]


@dataclass(frozen=True, kw_only=True)
class Config(Derived):
    """The settings of a run, frozen and keyword-only. Every process of a run must have equal settings.

    Decide on these first, in this order: ``precision``, ``align``, ``correction``, ``decode_graphs``, ``on_mismatch``,
    ``old_log_probs``, ``audit_fraction``, ``monitor_every``. The rest, by group:

    - precision: ``scale_format``, ``exclude``, ``on_cut``, ``head_dtype``
    - exactness: ``backend``, ``router_replay``, ``exact_attention``
    - rollout: ``rollout_granularity``, ``smoothing``, ``invariant_scale``, ``kv_cache``
    - sync: ``sync``, ``sync_timeout``, ``fp8_all_gather``
    - monitor: ``monitor_layers``, ``monitor_sqnr``, ``monitor_underflow``, ``monitor_action``, ``measure_routes``, ``guard_sqnr``
    - correction: ``correction_bounds``, ``acr``
    - optimizer: ``optimizer_states``, ``resume_any``
    - process: ``platform``, ``upstream_fixes``

    ``jetrl_patch/config/fields.py`` defines each with its values and its meaning; docs/configuration.md has them as tables.

    Raises ConfigError for a value that is unknown or malformed, and for settings that contradict each other.
    """

    def __post_init__(self) -> None:
        for name, found in SETTINGS.items():
            value = getattr(self, name)
            if found.choices and not (value is None and found.default is None):
                checks.check_choice(name, value, found.choices)
        for name, found in SETTINGS.items():
            if found.form is SWITCH and not (getattr(self, name) is None and found.default is None):
                checks.check_switch(name, getattr(self, name))
            if found.form is AUTO_SWITCH:
                checks.check_auto_switch(name, getattr(self, name))
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
        from jetrl_patch.config import environment  # here, because env imports the table of settings

        return {environment.SWITCH: "1", **{found.variable: written(getattr(self, name)) for name, found in SETTINGS.items()}}

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, **overrides: Any) -> Config:
        """The settings of the ``JETRL_*`` variables in ``environ`` (default: ``os.environ``), with defaults for the rest.

        ``overrides`` are fields that override the variables. Raises ConfigError for an unknown field or variable.
        """
        from jetrl_patch.config import environment

        return cls().replace(**{**from_text(environment.read_fields(environ)), **overrides})
