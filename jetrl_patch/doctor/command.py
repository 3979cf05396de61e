"""Parse a launch command: which framework it starts, with which arguments and which settings of the plugin."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any

from jetrl_patch.launch.arguments import PROGRAMS, split

__all__ = ["Started", "recognise"]

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_OURS = ("jetrl_patch", "jetrl_patch.cli.main")


@dataclass(frozen=True)
class Started:
    """A parsed command.

    Attributes:
        framework: "verl", "openrlhf", or None for anything else.
        target: dotted name of the module, or path of the script.
        arguments: the arguments of the target.
        overrides: fields of ``Config`` from the command's ``jetrl`` options.
        by_us: whether ``jetrl`` starts it, which patches the driver for any framework.
        environ: variable assignments before the command, also those of ``env``.
        before: the other words before the program: wrappers, and the interpreter with its options.
    """

    framework: str | None
    target: str
    arguments: list[str]
    overrides: dict[str, Any] = field(default_factory=dict)
    by_us: bool = False
    environ: dict[str, str] = field(default_factory=dict)
    before: tuple[str, ...] = ()


def recognise(command: Sequence[str]) -> Started:
    """Find ``-m MODULE``, ``SCRIPT.py`` or ``jetrl`` after any wrapper (env, torchrun, ray job submit …).

    A single word with blanks is split as a whole command line. Raises ConfigError for invalid options of ``jetrl``.
    """
    words = shlex.split(command[0]) if len(command) == 1 and " " in command[0] else list(command)
    environ: dict[str, str] = {}
    before: list[str] = []
    for i, word in enumerate(words):
        rest = words[i + 1 :]
        module = rest[0] if word == "-m" and rest else ""
        if PurePath(word).name == "jetrl" or module in _OURS:
            return replace(_ours(rest[1:] if module else rest, environ), before=tuple(before))
        if module and not module.startswith("-"):
            return Started(_framework(module), module, rest[1:], environ=environ, before=tuple(before))
        if word.endswith(".py"):
            target = _module_of(word)
            return Started(_framework(target), target, rest, environ=environ, before=tuple(before))
        assignment = _ASSIGNMENT.fullmatch(word)
        if assignment:
            environ[assignment[1]] = assignment[2]
        elif word != "env":
            before.append(word)
    return Started(None, " ".join(words), [], environ=environ)


def _ours(words: list[str], environ: dict[str, str]) -> Started:
    if not words or words[0] not in ("run", *PROGRAMS):
        return Started(None, " ".join(["jetrl", *words[:1]]), words[1:], environ=environ)
    launch = split(words[0], words[1:])
    target = launch.target if launch.is_module else _module_of(launch.target)
    return Started(_framework(target), target, list(launch.arguments), launch.overrides, True, environ)


def _module_of(script: str) -> str:
    """The module of a known program's script (``…/verl/trainer/main_ppo.py``); any other script stays a path."""
    dotted = ".".join(PurePath(script).with_suffix("").parts)
    return next((module for module in PROGRAMS.values() if dotted.endswith(module)), script)


def _framework(target: str) -> str | None:
    root = target.split(".")[0]
    return root if root in PROGRAMS and not target.endswith(".py") else None
