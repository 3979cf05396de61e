"""Which of verl's programs the plugin supports."""

from __future__ import annotations

import os
import sys
from pathlib import PurePath

from jetrl_patch.errors import ConfigError, JetrlError, explain
from jetrl_patch.launch.arguments import PROGRAMS

__all__ = ["TRAINERS", "own_program", "program_problem"]

#: the programs that train with the plugin -> the default name of their configuration, in a folder ``config`` beside them
TRAINERS = {
    PROGRAMS["verl"]: "ppo_trainer",
    "verl.experimental.one_step_off_policy.main_ppo": "one_step_off_ppo_trainer",
    "verl.experimental.fully_async_policy.fully_async_main": "fully_async_ppo_trainer",
}
#: packages whose programs train or generate
_PROGRAMS = ("verl.trainer", "verl.experimental")
#: of these, the ones that run with the plugin; the evaluation loads no model
_SUPPORTED = (*TRAINERS, "verl.trainer.main_eval")


def program_problem(target: str) -> JetrlError | None:
    """Return the error for a program of verl that the plugin does not support, whatever the precision.

    Args:
        target: dotted name of a module, or path of a script; a program that is not verl's is never refused.
    """
    module = _module(target)
    if module in _SUPPORTED or not module.startswith(tuple(f"{package}." for package in _PROGRAMS)):
        return None
    return ConfigError(
        explain(
            f"jetrl_patch in {module}",
            required=f"{PROGRAMS['verl']} or an asynchronous trainer, whose weight syncs and log-probs the plugin follows",
            found="another program of verl (supervised, or generating alone)",
            fix=f"use {PROGRAMS['verl']}, or start this program without jetrl_patch",
        )
    )


def own_program() -> str:
    """Return the dotted name or the path of the program that this process runs; empty if there is none."""
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    return str(spec.name) if spec is not None else str(getattr(main, "__file__", None) or "")


def _module(target: str) -> str:
    """The dotted name of a script inside verl's package (``…/verl/trainer/x.py``); other targets stay what they are."""
    if not target.endswith(".py") and os.sep not in target:
        return target.removesuffix(".__main__")
    parts = PurePath(target).with_suffix("").parts
    at = max((i for i, part in enumerate(parts) if part == "verl"), default=None)
    return target if at is None else ".".join(parts[at:])
