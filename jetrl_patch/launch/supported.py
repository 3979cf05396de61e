"""Refuse programs of a training framework that the plugin does not support, before they start."""

from __future__ import annotations

import re

from jetrl_patch import registry
from jetrl_patch.errors import JetrlError
from jetrl_patch.launch.arguments import PROGRAMS

__all__ = ["program_problem"]


def program_problem(target: str) -> JetrlError | None:
    """Return the error for a program inside a framework's package that is not supported; None for any other.

    Args:
        target: dotted name of a module, or path of a script. Nothing is imported but the framework's adapter.
    """
    parts = re.split(r"[./\\\\]", target)
    for framework in PROGRAMS:
        if framework in parts:
            return registry.trainer(framework).program_problem(target)
    return None
