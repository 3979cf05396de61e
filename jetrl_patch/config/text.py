"""The text form of settings in variables and on command lines: one form for each kind of value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jetrl_patch.errors import ConfigError

__all__ = ["BOUNDS", "NUMBER", "PATTERNS", "SECONDS", "SWITCH", "WHOLE", "WORD", "Form", "read_switch", "written"]

_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off"}


@dataclass(frozen=True)
class Form:
    """The text form of one kind of value.

    Attributes:
        values: the allowed values, in words.
        read: (name of the variable, text) -> value. Raises ConfigError for malformed text.
        note: addition to the description of a variable.
        example: an example of the text.
    """

    values: str
    read: Callable[[str, str], Any]
    note: str = ""
    example: str = "…"


def written(value: object) -> str:
    """The value of a field as text that its form can read; empty for ``None``."""
    if value is None:
        return ""
    if isinstance(value, tuple):
        return ",".join(map(written, value))
    if isinstance(value, bool):
        return str(int(value))
    return value if isinstance(value, str) else repr(value)


def read_switch(name: str, text: str) -> bool:
    """Parse a word that means on or off. Raises ConfigError for any other."""
    word = text.strip().lower()
    if word not in _TRUE | _FALSE:
        raise ConfigError(f"{name}={text!r} is neither on nor off. Write 1 or 0.")
    return word in _TRUE


def _word(variable: str, text: str) -> str:
    return text


def _patterns(variable: str, text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


def _bounds(variable: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(map(float, text.split(",")))
    except ValueError:
        raise ConfigError(f"{variable}={text!r} is neither a cap nor low,high. Write one or two numbers.") from None


def _number(kind: Callable[[str], float], what: str = "number") -> Callable[[str, str], float]:
    def read(variable: str, text: str) -> float:
        try:
            return kind(text)
        except ValueError:
            raise ConfigError(f"{variable}={text!r} is not a {what}") from None

    return read


WORD = Form("a word", _word)
SWITCH = Form("`true`, `false`", read_switch, ": 1 or 0")
NUMBER = Form("number", _number(float))
SECONDS = Form("number", _number(float, "number of seconds"), ", in seconds")
WHOLE = Form("whole number", _number(int, "whole number"))
PATTERNS = Form("patterns", _patterns, ", separated by commas", "a,b")
BOUNDS = Form("cap, or low and high", _bounds, ": the cap, or low,high")
