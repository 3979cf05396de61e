"""Split a command line into jetrl's options and the program's arguments, which stay unchanged.

argparse and click both drop a lone ``--`` from what they pass on, so this module parses by hand. jetrl's options come first, then
the program, then the program's own arguments. One exception: ``--fp8-unified`` is also found among these, before a lone ``--``.
What looks like one of our options there is an error: a misspelt flag must not start an unpatched run.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jetrl_patch.config import SETTINGS, Config
from jetrl_patch.errors import ConfigError, explain, unknown

#: the flag for the default precision
FLAG = f"--{SETTINGS['precision'].default}"
_OPTIONS = [found for found in SETTINGS.values() if found.option is not None]
_VALUED = (*(found.flag for found in _OPTIONS if found.option), "--set")
_SWITCHES = {
    FLAG: ("precision", SETTINGS["precision"].default),
    **{found.flag: (found.name, True) for found in _OPTIONS if not found.option},
}


@dataclass(frozen=True)
class Launch:
    """A parsed command line.

    Attributes:
        target: the name of a module or the path of a script.
        is_module: whether ``target`` is a module.
        arguments: the program's arguments, byte for byte.
        overrides: fields of ``Config`` set by options.
        help: whether only jetrl's usage text is wanted.
    """

    target: str = ""
    is_module: bool = False
    arguments: tuple[str, ...] = ()
    overrides: dict[str, Any] = field(default_factory=dict)
    help: bool = False


def options(words: Sequence[str]) -> dict[str, Any]:
    """The fields of ``Config`` that jetrl's options set. Raises ConfigError for an unknown or contradictory one."""
    settings = _Settings()
    _take_options(words, settings, stop_at_unknown=False)
    return settings.values


def split(command: str, words: Sequence[str], programs: Mapping[str, str]) -> Launch:
    """Parse the words after ``jetrl COMMAND``, where the command is "run" or a key of ``programs``, which has its module.

    Raises ConfigError for a missing program, an unknown option before it, one of ours or nearly so after it, or an unknown or
    contradictory setting.
    """
    settings = _Settings()
    short = programs.get(command, "")
    at = _take_options(words, settings, stop_at_unknown=bool(short))
    if at is None:
        return Launch(help=True)
    target, is_module, at = (short, True, at) if short else _take_program(words, at)
    arguments = list(words[at:])
    end = arguments.index("--") if "--" in arguments else len(arguments)
    if FLAG in arguments[:end]:
        settings.add(*_SWITCHES[FLAG], FLAG)
    kept = [word for word in arguments[:end] if word != FLAG]
    _check_not_ours(kept, command, (*_SWITCHES, *_VALUED) if target in programs.values() else (FLAG,))
    return Launch(target, is_module, (*kept, *arguments[end:]), settings.values)


def _check_not_ours(arguments: Sequence[str], command: str, ours: Sequence[str]) -> None:
    """Raise ConfigError for an argument that is one of our options, or nearly one: the program would run with other settings."""
    for word in arguments:
        option = word.partition("=")[0]
        near = difflib.get_close_matches(option, ours, 1, cutoff=0.8) if option.startswith("-") else []
        if near:
            fix = f"write {near[0]} before the program's arguments, or `--` before an argument of the program's own"
            raise ConfigError(explain(f"jetrl {command}", required="no option of jetrl's here", found=option, fix=fix))


class _Settings:
    """Fields of ``Config``, each with the option that set it."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self._sources: dict[str, str] = {}

    def add(self, name: str, value: Any, source: str) -> None:
        """Record a setting. Raises ConfigError if an earlier option gave it another value."""
        if name in self.values and self.values[name] != value:
            found = f"{self._sources[name]} and {source}"
            raise ConfigError(explain("the command line", required=f"one {name}", found=found, fix="drop one of the two"))
        self.values[name] = value
        self._sources[name] = source

    def take(self, option: str, value: str) -> None:
        """Record an option with its value."""
        if option == "--set":
            name, equals, text = value.partition("=")
            if not equals:
                fix = "write --set key=value"
                raise ConfigError(explain(f"--set {value}", required="key=value", found="no '='", fix=fix))
        else:
            name, text = option.removeprefix("--").replace("-", "_"), value
        source = f"{option} {value}"
        self.add(name, _parse(name, text, source), source)


def _take_options(words: Sequence[str], settings: _Settings, stop_at_unknown: bool) -> int | None:
    """Read jetrl's leading options. Returns the index of the word after them, or None if help is asked for."""
    at = 0
    while at < len(words) and words[at].startswith("-"):
        word = words[at]
        option, equals, value = word.partition("=")
        if word in _SWITCHES:
            settings.add(*_SWITCHES[word], word)
            at += 1
        elif option in _VALUED:
            if not equals:
                if at + 1 == len(words):
                    fix = f"write {option} VALUE"
                    raise ConfigError(explain(option, required="a value", found="the end of the line", fix=fix))
                at, value = at + 1, words[at + 1]
            settings.take(option, value)
            at += 1
        elif word in ("-h", "--help"):
            return None
        elif stop_at_unknown or word == "-m":
            break
        elif word == "--":
            return at + 1
        else:
            required = f"one of {', '.join((*_SWITCHES, *_VALUED))} before the program"
            fix = "put the program's own arguments after the program"
            raise ConfigError(explain("jetrl run", required=required, found=word, fix=fix))
    return at


def _take_program(words: Sequence[str], at: int) -> tuple[str, bool, int]:
    """Read the program: ``(target, is_module, index of its first argument)``."""
    is_module = at < len(words) and words[at] == "-m"
    at += is_module
    if at >= len(words) or not words[at]:
        fix = "write, for instance, `jetrl run --fp8-unified -m verl.trainer.main_ppo ...`"
        raise ConfigError(explain("jetrl run", required="-m MODULE or a script", found="neither", fix=fix))
    return words[at], is_module, at + 1


def _parse(name: str, text: str, source: str) -> Any:
    """Parse a field of ``Config`` from text, as from its variable. Only ``exclude`` can be empty."""
    if name not in SETTINGS:
        raise ConfigError(f"{source}: {unknown(f'setting {name!r}', [name], SETTINGS)}")
    if not text.strip() and name != "exclude":
        raise ConfigError(explain(source, required=f"a value of {name}", found="none", fix="add a value or drop the option"))
    try:
        return Config.parse(name, text)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
