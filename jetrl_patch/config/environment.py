"""The settings as text, and the only reader of the ``JETRL_*`` environment variables. Nothing is read at import.

The variables are derived from the table of settings (``jetrl_patch/config/fields.py``).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

from jetrl_patch.config.fields import PREFIX as PREFIX
from jetrl_patch.config.fields import SETTINGS, read_switch
from jetrl_patch.errors import ConfigError, unknown

SWITCH = f"{PREFIX}ENABLED"

#: environment variable -> field of ``Config``
FIELDS = {found.variable: name for name, found in SETTINGS.items()}

#: the variable under which a process that would train is examined instead
FOLLOW = f"{PREFIX}DOCTOR"

#: the variables for the machine, not for the run
MACHINE = {
    "JETRL_CACHE_DIR": "folder for the compiled CPU kernels (default: the user's cache folder)",
    "JETRL_CPU_ISA": "instruction set of the CPU kernels: avx512_bf16, avx512, avx2 or portable (default: the best available)",
    FOLLOW: "set by jetrl doctor --follow: the folder in which it collects what it has found",
}
#: every variable with its meaning; any other name that starts with ``JETRL_`` is treated as a typo
VARIABLES = {
    SWITCH: "1: patch this process and its children; 0: patch nothing, whatever other variables and scripts say",
    **{found.variable: f"Config.{name}{found.note}" for name, found in SETTINGS.items()},
    **MACHINE,
}


def written(value: object) -> str:
    """The value of a field as text that its form can read; empty for ``None``."""
    if value is None:
        return ""
    if isinstance(value, tuple):
        return ",".join(map(written, value))
    if isinstance(value, bool):
        return str(int(value))
    return value if isinstance(value, str) else repr(value)


def from_text(fields: Mapping[str, str]) -> dict[str, Any]:
    """Parse fields of ``Config`` from text, as in environment variables. Raises ConfigError for malformed text."""
    return {name: SETTINGS[name].form.read(SETTINGS[name].variable, text) for name, text in fields.items()}


def by_field(variables: Mapping[str, str]) -> dict[str, str]:
    """Rename variables to the fields they set, for messages. A variable that sets no field keeps its name."""
    return {FIELDS.get(name, name): value for name, value in variables.items()}


def without_settings(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment for a process with its own settings: without ``JETRL_*``, except for ``MACHINE``."""
    env = os.environ if environ is None else environ
    return {name: value for name, value in env.items() if not name.startswith(PREFIX) or name in MACHINE}


def mentioned(environ: Mapping[str, str] | None = None) -> bool:
    """Whether the environment has any ``JETRL_*`` variable, be it misspelt."""
    return any(name.startswith(PREFIX) for name in (os.environ if environ is None else environ))


def opted_in(environ: Mapping[str, str] | None = None) -> bool:
    """Whether the environment asks to patch this process: ``JETRL_ENABLED=1``, or ``JETRL_PRECISION`` is set.

    ``JETRL_ENABLED=0`` overrides ``JETRL_PRECISION``. Raises ConfigError for a value that is neither on nor off.
    """
    env = os.environ if environ is None else environ
    if env.get(SWITCH, "").strip():
        return read_switch(SWITCH, env[SWITCH])
    return bool(env.get(SETTINGS["precision"].variable, "").strip())


def switched_off(environ: Mapping[str, str] | None = None) -> bool:
    """Whether ``JETRL_ENABLED`` is set and off. Raises ConfigError for a value that is neither on nor off."""
    env = os.environ if environ is None else environ
    return bool(env.get(SWITCH, "").strip()) and not opted_in(environ)


# ---- A process that reads settings and frameworks, and runs nothing, is not to be patched ---------

_looking = False


def looking() -> bool:
    """Whether the entry points are to ignore the environment for now."""
    return _looking


@contextlib.contextmanager
def only_looking() -> Iterator[None]:
    """Let the entry points ignore the environment, whatever is imported meanwhile."""
    global _looking
    before, _looking = _looking, True
    try:
        yield
    finally:
        _looking = before


def check_names(environ: Mapping[str, str] | None = None) -> None:
    """Raise ConfigError for unknown ``JETRL_*`` names. A misspelled variable may be the one meant to enable the plugin."""
    env = os.environ if environ is None else environ
    wrong = sorted(name for name in env if name.startswith(PREFIX) and name not in VARIABLES)
    if wrong:
        raise ConfigError(unknown(f"environment variable {', '.join(wrong)}", wrong, VARIABLES))


def read_fields(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Field name -> text, for every variable that is set. An empty variable counts as not set.

    Raises ConfigError for an unknown ``JETRL_*`` name.
    """
    env = os.environ if environ is None else environ
    check_names(env)
    return {field: env[name].strip() for name, field in FIELDS.items() if env.get(name, "").strip()}


def read_variable(name: str) -> str:
    """The value of a variable in ``VARIABLES`` that is not a field of ``Config``; empty if it is not set."""
    if name not in VARIABLES:
        raise ConfigError(f"{name} is not a variable of jetrl_patch. To read it, first add it to config/environment.py.")
    return os.environ.get(name, "").strip()
