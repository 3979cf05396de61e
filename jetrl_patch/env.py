"""The only reader of ``JETRL_*`` environment variables, lazily: nothing is read at import.

The variables follow from the table of settings (``jetrl_patch/config/fields.py``).
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from jetrl_patch.config.fields import SETTINGS
from jetrl_patch.config.setting import PREFIX
from jetrl_patch.config.text import read_switch
from jetrl_patch.errors import ConfigError

__all__ = [
    "FIELDS",
    "PREFIX",
    "SWITCH",
    "VARIABLES",
    "by_field",
    "opted_in",
    "read_fields",
    "read_variable",
    "switched_off",
]

SWITCH = f"{PREFIX}ENABLED"

#: environment variable -> field of ``Config``
FIELDS = {found.variable: name for name, found in SETTINGS.items()}

#: every variable there is, with its meaning; anything else that starts with ``JETRL_`` is a mistake in writing
VARIABLES = {
    SWITCH: "1: plugins act in this process and its children; 0: they do nothing, whatever other variables say",
    **{found.variable: f"Config.{name}{found.note}" for name, found in SETTINGS.items()},
    "JETRL_CACHE_DIR": "folder of the compiled CPU kernels (default: the user's cache folder)",
}


def by_field(variables: Mapping[str, str]) -> dict[str, str]:
    """Variables under the names of the fields they set, for messages; one that sets no field keeps its own name."""
    return {FIELDS.get(name, name): value for name, value in variables.items()}


def opted_in(environ: Mapping[str, str] | None = None) -> bool:
    """Whether this process is meant to be patched: ``JETRL_ENABLED=1``, or ``JETRL_PRECISION`` is set.

    ``JETRL_ENABLED=0`` wins over everything. Raises ConfigError for any other word.
    """
    env = os.environ if environ is None else environ
    if env.get(SWITCH, "").strip():
        return read_switch(SWITCH, env[SWITCH])
    return bool(env.get(SETTINGS["precision"].variable, "").strip())


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
