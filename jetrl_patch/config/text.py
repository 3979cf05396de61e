"""Settings as the text that variables and command lines carry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jetrl_patch import env
from jetrl_patch.errors import ConfigError

__all__ = ["from_text", "written"]


def written(value: object) -> str:
    """The value of a field as text that ``from_text`` reads back; nothing for ``None``."""
    if value is None:
        return ""
    if isinstance(value, tuple):
        return ",".join(map(written, value))
    if isinstance(value, bool):
        return str(int(value))
    return value if isinstance(value, str) else repr(value)


def from_text(fields: Mapping[str, str]) -> dict[str, Any]:
    """Fields of ``Config`` from their text, as variables carry them. Raises ConfigError for text of the wrong form."""
    return {name: _READ[name](name, text) if name in _READ else text for name, text in fields.items()}


def _variable(field: str) -> str:
    return next(variable for variable, name in env.FIELDS.items() if name == field)


def _switch(field: str, text: str) -> bool:
    return env.read_switch(_variable(field), text)


def _patterns(field: str, text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


def _bounds(field: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(map(float, text.split(",")))
    except ValueError:
        raise ConfigError(f"{_variable(field)}={text!r} is neither a cap nor low,high") from None


def _number(kind: Callable[[str], float], what: str = "number") -> Callable[[str, str], float]:
    def read(field: str, text: str) -> float:
        try:
            return kind(text)
        except ValueError:
            raise ConfigError(f"{_variable(field)}={text!r} is not a {what}") from None

    return read


_READ: dict[str, Callable[[str, str], Any]] = {
    "exclude": _patterns,
    "correction_bounds": _bounds,
    "sync_timeout": _number(float, "number of seconds"),
    "monitor_every": _number(int, "whole number"),
    **dict.fromkeys(("monitor_sqnr", "monitor_underflow", "guard_sqnr", "smoothing", "invariant_scale"), _number(float)),
    **dict.fromkeys(("acr", "fp8_all_gather", "monitor_layers", "resume_any"), _switch),
}
