"""A launch command: its framework and arguments, the plugin's settings in it, and the judgement of the framework's adapter."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any

from jetrl_patch import registry
from jetrl_patch.cli.doctor.surroundings import check_needs, check_policy
from jetrl_patch.config import SETTINGS, Config, environment, from_text
from jetrl_patch.config.arguments import PROGRAMS, split
from jetrl_patch.errors import ConfigError, JetrlError
from jetrl_patch.trainer.rules import Check, from_error

__all__ = ["Started", "check_launch", "check_settings", "judge", "recognise", "usable"]


# ---- The plugin's settings as far as they are right, and an error for each that is wrong ---------

def usable(environ: Mapping[str, str], given: Mapping[str, Any]) -> tuple[Config, list[JetrlError]]:
    """The settings of an environment and of options (``given``) without the wrong ones, and all errors."""
    errors: list[JetrlError] = []
    _tried(lambda: environment.check_names(environ), errors)
    _tried(lambda: environment.opted_in(environ), errors)
    known = {name: environ[name] for name in environment.FIELDS if name in environ}
    whole: list[JetrlError] = []
    config = _tried(lambda: Config.from_env(known, **given), whole)
    if config is not None:
        return config, errors
    single: list[JetrlError] = []
    right = {name: text for name, text in known.items() if _tried(lambda n=name, t=text: _alone(n, t), single)}  # type: ignore[misc]
    # what is right by itself and wrong together is one error
    config = _tried(lambda: Config.from_env(right, **given), [])
    return config or _tried(lambda: Config(**given), []) or Config(), [*errors, *(single or whole)]


def _alone(name: str, text: str) -> bool:
    """Judge one variable. One that needs another setting is only read."""
    if SETTINGS[environment.FIELDS[name]].joint:
        from_text({environment.FIELDS[name]: text})
    else:
        Config.from_env({name: text})
    return True


def _tried(check: Callable[[], Any], errors: list[JetrlError]) -> Any:
    try:
        return check()
    except JetrlError as error:
        errors.append(error)
        return None


# ---- Parse a launch command: which framework it starts, with which arguments and which settings of the plugin

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


# ---- Judge a launch by the framework's adapter (``jetrl_patch.registry.Trainer``): its settings, and its machine

def judge(framework: str, arguments: Sequence[str], config: Config, *, here: bool = True) -> list[Check]:
    """Judge a launch of a framework. All problems are found, not the first alone.

    Args:
        framework: "verl" or "openrlhf".
        arguments: the arguments of the framework's trainer (``config.arguments.PROGRAMS``).
        config: the plugin's settings.
        here: whether it would start on this machine, with its GPUs, files and models; else only the settings are judged.

    Returns:
        The checks. A run would not start if the state of one is "problem"; if there is none, a state "unknown" says that it
        cannot be told; otherwise it would start (``Report(checks=…).starts``).
    """
    try:
        settings = registry.trainer(framework).read(arguments)
    except JetrlError as error:
        return [from_error("command", error)]
    found = list(check_launch(framework, settings, config)) if here else []
    return [*found, *check_settings(framework, settings, config)]


def check_launch(
    framework: str, settings: Any, config: Config, environ: Mapping[str, str] | None = None
) -> Iterator[Check]:
    """Check what a launch takes from this machine: GPUs, models, data, the environment of its workers.

    Args:
        environ: the environment of the launch; by default this process's.
    """
    trainer = registry.trainer(framework)
    on_cpu = registry.platform().is_cpu_run(config)
    yield check_policy(*trainer.model_path(settings), framework)
    yield from check_needs(framework, trainer.needs(settings), on_cpu, os.environ if environ is None else environ)


def check_settings(framework: str, settings: Any, config: Config) -> Iterator[Check]:
    """Check each setting and the model's ``config.json``, and list what the plugin would change. Modifies ``settings``."""
    found = [from_error(f"{framework} setting", error) for error in _problems(framework, settings, config)]
    yield from found
    if not found:
        yield Check(f"{framework} settings", "ok", "no conflict with the plugin's settings")
    changes = registry.trainer(framework).complete(settings, config)
    yield Check(f"{framework} changes", "ok", "; ".join(changes) or "none of your settings")


def _problems(framework: str, settings: Any, config: Config) -> Iterator[BaseException]:
    try:
        yield from registry.trainer(framework).problems(settings, config)
    except JetrlError as error:
        yield error
    except Exception as error:  # a broken config.json or a missing key would stop the framework as well
        yield ConfigError(f"{type(error).__name__}: {' '.join(str(error).split())}")
