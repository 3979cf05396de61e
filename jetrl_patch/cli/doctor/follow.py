"""Run a command up to the training program that it starts, which is examined in its place.

Every process that imports torch calls the plugin's entry point (``adapters/torch``), which then asks a doctor of its own.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from jetrl_patch import registry
from jetrl_patch.cli.doctor.launch import AWAY, recognise
from jetrl_patch.cli.run import as_command
from jetrl_patch.config.environment import FOLLOW
from jetrl_patch.config.following import read_statuses, write_options
from jetrl_patch.errors import ConfigError, JetrlError, explain, reading

#: what starts a command where nothing would stop it
_AWAY = re.compile(rf"(?:^|[;&|(]|\bexec|\bsudo|\bthen|\bdo|\belse)\s*({'|'.join(AWAY)}|ray\s+job\s+submit)\s")


def follow(command: Sequence[str], options: Sequence[str]) -> int:
    """Run a command and return the worst exit status of the doctors that examined what it started.

    Raises ConfigError if it starts something on another machine, if there is no such command, or if it starts no training.
    """
    words = [*(as_command(command[0]) or command[:1]), *command[1:]]
    for path in filter(os.path.isfile, command):
        _require_here(path)
    with tempfile.TemporaryDirectory(prefix="jetrl-doctor-") as folder:
        write_options(folder, options)
        status = subprocess.run(words, env={**os.environ, FOLLOW: folder}).returncode
        statuses = read_statuses(folder)
    if not statuses:
        known = " or ".join(registry.programs())
        required, what = f"a command that starts a program of {known}", f"none until it ended with status {status}"
        fix = "give the doctor the program's own command"
        raise ConfigError(explain("jetrl doctor --follow", required=required, found=what, fix=fix))
    return next(status for status in (1, 2, 0) if status in statuses)


def _require_here(path: str) -> None:
    with reading(path):
        lines = Path(path).read_text(errors="replace").splitlines()
    for number, line in enumerate(lines, 1):
        if found := _AWAY.search(line.partition("#")[0] + " "):
            required, what = "a script that starts the training itself", f"`{found[1]}` in line {number} of {path}"
            fix = "run the doctor where that command runs"
            raise ConfigError(explain("jetrl doctor --follow", required=required, found=what, fix=fix))


def starts_training(command: Sequence[str]) -> bool:
    """Whether a command starts a program whose arguments an adapter reads."""
    try:
        started = recognise(command)
    except JetrlError:
        return True  # its options are wrong, which the examination says
    launches = registry.resolve(started.framework).launches() if started.framework else None
    return launches is not None and started.target in launches.programs
