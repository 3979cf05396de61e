"""The doctor's checks of a launch, without those of the installation."""

from __future__ import annotations

import os
from collections.abc import Sequence

from jetrl_patch import registry
from jetrl_patch.cli.doctor.launch import check_launch, check_settings
from jetrl_patch.config import Config
from jetrl_patch.errors import JetrlError
from jetrl_patch.trainer.rules import Check, from_error


def judge(framework: str, arguments: Sequence[str], config: Config, *, here: bool = True) -> list[Check]:
    """Check a launch of a framework's trainer with these arguments.

    ``here`` checks this machine's GPUs, files and models as well as the settings.
    """
    try:
        settings = registry.trainer(framework).read(arguments)
    except JetrlError as error:
        return [from_error("command", error)]
    found = list(check_launch(framework, settings, config, os.environ)) if here else []
    return [*found, *check_settings(framework, settings, config)]
