"""Judge a launch by the framework's adapter (``jetrl_patch.trainer.interface.Trainer``): its settings, and its machine."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jetrl_patch import registry
from jetrl_patch.config import Config
from jetrl_patch.doctor.report import Check, from_error
from jetrl_patch.doctor.surroundings import check_needs, check_policy
from jetrl_patch.errors import ConfigError, JetrlError

__all__ = ["check_launch", "check_settings", "judge"]


def judge(framework: str, arguments: Sequence[str], config: Config, *, here: bool = True) -> list[Check]:
    """Judge a launch of a framework. All problems are found, not the first alone.

    Args:
        framework: "verl" or "openrlhf".
        arguments: the arguments of the framework's trainer (``launch.arguments.PROGRAMS``).
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
    yield Check(f"{framework} changes", "ok", "; ".join(changes) or "nothing would be changed")


def _problems(framework: str, settings: Any, config: Config) -> Iterator[BaseException]:
    try:
        yield from registry.trainer(framework).problems(settings, config)
    except JetrlError as error:
        yield error
    except Exception as error:  # a broken config.json or a missing key would stop the framework as well
        yield ConfigError(f"{type(error).__name__}: {' '.join(str(error).split())}")
