"""The only reader of ``JETRL_*`` environment variables, lazily: nothing is read at import."""

from __future__ import annotations

import os
from collections.abc import Mapping

from jetrl_patch.errors import ConfigError

__all__ = [
    "FIELDS",
    "PREFIX",
    "SWITCH",
    "VARIABLES",
    "by_field",
    "opted_in",
    "read_fields",
    "read_switch",
    "read_variable",
    "switched_off",
]

PREFIX = "JETRL_"
SWITCH = "JETRL_ENABLED"

#: environment variable -> field of ``Config``
FIELDS = {
    "JETRL_PRECISION": "precision",
    "JETRL_ALIGN": "align",
    "JETRL_SCALE_FORMAT": "scale_format",
    "JETRL_EXCLUDE": "exclude",
    "JETRL_BACKEND": "backend",
    "JETRL_PLATFORM": "platform",
    "JETRL_SYNC_TIMEOUT": "sync_timeout",
    "JETRL_FP8_ALL_GATHER": "fp8_all_gather",
    "JETRL_MONITOR_EVERY": "monitor_every",
    "JETRL_MONITOR_LAYERS": "monitor_layers",
    "JETRL_MONITOR_SQNR": "monitor_sqnr",
    "JETRL_MONITOR_UNDERFLOW": "monitor_underflow",
    "JETRL_MONITOR_ACTION": "monitor_action",
    "JETRL_GUARD_SQNR": "guard_sqnr",
    "JETRL_CORRECTION": "correction",
    "JETRL_CORRECTION_BOUNDS": "correction_bounds",
    "JETRL_ACR": "acr",
    "JETRL_ROLLOUT_GRANULARITY": "rollout_granularity",
    "JETRL_SMOOTHING": "smoothing",
    "JETRL_INVARIANT_SCALE": "invariant_scale",
    "JETRL_KV_CACHE": "kv_cache",
    "JETRL_HEAD_DTYPE": "head_dtype",
    "JETRL_OPTIMIZER_STATES": "optimizer_states",
    "JETRL_RESUME_ANY": "resume_any",
}

#: every variable there is, with its meaning; anything else that starts with ``JETRL_`` is a mistake in writing
VARIABLES = {
    SWITCH: "1: plugins act in this process and its children; 0: they do nothing, whatever other variables say",
    "JETRL_PRECISION": "Config.precision; setting it opts in as JETRL_ENABLED=1 does",
    "JETRL_ALIGN": "Config.align",
    "JETRL_SCALE_FORMAT": "Config.scale_format",
    "JETRL_EXCLUDE": "Config.exclude, separated by commas",
    "JETRL_BACKEND": "Config.backend",
    "JETRL_PLATFORM": "Config.platform",
    "JETRL_SYNC_TIMEOUT": "Config.sync_timeout, in seconds",
    "JETRL_FP8_ALL_GATHER": "Config.fp8_all_gather: 1 or 0",
    "JETRL_MONITOR_EVERY": "Config.monitor_every, in steps",
    "JETRL_MONITOR_LAYERS": "Config.monitor_layers: 1 or 0",
    "JETRL_MONITOR_SQNR": "Config.monitor_sqnr, in dB",
    "JETRL_MONITOR_UNDERFLOW": "Config.monitor_underflow, a share",
    "JETRL_MONITOR_ACTION": "Config.monitor_action",
    "JETRL_GUARD_SQNR": "Config.guard_sqnr, in dB",
    "JETRL_CORRECTION": "Config.correction",
    "JETRL_CORRECTION_BOUNDS": "Config.correction_bounds: the cap, or low,high",
    "JETRL_ACR": "Config.acr: 1 or 0",
    "JETRL_ROLLOUT_GRANULARITY": "Config.rollout_granularity",
    "JETRL_SMOOTHING": "Config.smoothing",
    "JETRL_INVARIANT_SCALE": "Config.invariant_scale",
    "JETRL_KV_CACHE": "Config.kv_cache",
    "JETRL_HEAD_DTYPE": "Config.head_dtype",
    "JETRL_OPTIMIZER_STATES": "Config.optimizer_states",
    "JETRL_RESUME_ANY": "Config.resume_any: 1 or 0",
    "JETRL_CACHE_DIR": "folder of the compiled CPU kernels (default: the user's cache folder)",
}


def by_field(variables: Mapping[str, str]) -> dict[str, str]:
    """Variables under the names of the fields they set, for messages; one that sets no field keeps its own name."""
    return {FIELDS.get(name, name): value for name, value in variables.items()}


_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off"}


def opted_in(environ: Mapping[str, str] | None = None) -> bool:
    """Whether this process is meant to be patched: ``JETRL_ENABLED=1``, or ``JETRL_PRECISION`` is set.

    ``JETRL_ENABLED=0`` wins over everything. Raises ConfigError for any other word.
    """
    env = os.environ if environ is None else environ
    switch = env.get(SWITCH, "").strip().lower()
    if switch in _TRUE:
        return True
    if switch in _FALSE:
        return False
    if switch:
        raise ConfigError(f"{SWITCH}={env[SWITCH]!r} is neither on nor off; write 1 or 0")
    return bool(env.get("JETRL_PRECISION", "").strip())


def read_switch(name: str, text: str) -> bool:
    """A word that means on or off. Raises ConfigError for any other."""
    word = text.strip().lower()
    if word not in _TRUE | _FALSE:
        raise ConfigError(f"{name}={text!r} is neither on nor off; write 1 or 0")
    return word in _TRUE


def switched_off(environ: Mapping[str, str] | None = None) -> bool:
    """Whether ``JETRL_ENABLED`` is there and says no. Raises ConfigError for a word that is neither yes nor no."""
    env = os.environ if environ is None else environ
    return bool(env.get(SWITCH, "").strip()) and not opted_in(environ)


def read_fields(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The settings that are set, by field name and still as text; an empty variable counts as not set.

    Raises ConfigError for a ``JETRL_*`` name that does not exist: a misspelt setting must not be ignored.
    """
    env = os.environ if environ is None else environ
    unknown = sorted(name for name in env if name.startswith(PREFIX) and name not in VARIABLES)
    if unknown:
        raise ConfigError(
            f"unknown environment variable {', '.join(unknown)}; the known ones are {', '.join(VARIABLES)}"
        )
    return {field: env[name].strip() for name, field in FIELDS.items() if env.get(name, "").strip()}


def read_variable(name: str, default: str = "", environ: Mapping[str, str] | None = None) -> str:
    """The value of one variable of ``VARIABLES`` that is not a field of ``Config``, or the default."""
    if name not in VARIABLES:
        raise ConfigError(f"{name} is not a variable of this project; add it to jetrl_patch/env.py first")
    env = os.environ if environ is None else environ
    return env.get(name, "").strip() or default
