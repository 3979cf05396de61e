"""A process under ``jetrl doctor --follow``: its command is examined, and if it starts a training, the process ends there."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from typing import NoReturn

from jetrl_patch.config.environment import FOLLOW
from jetrl_patch.config.following import ANOTHER, add_status, read_options
from jetrl_patch.patching.patch import watch


def examine(folder: str) -> None:
    """Ask a doctor about this process's command. Return if it starts no training; then vLLM must not be loaded, either."""
    environ = {name: value for name, value in os.environ.items() if name != FOLLOW}
    words = [sys.executable, "-m", "jetrl_patch", "doctor", *read_options(folder), "--instead", "--", *sys.orig_argv]
    status = subprocess.run(words, env=environ).returncode
    if status != ANOTHER:
        _end(folder, status)

    def stop(_: object) -> None:
        command = shlex.join(sys.orig_argv)
        print(f"jetrl doctor: `{command}` loads vLLM, and its arguments cannot be read, so it ends here", file=sys.stderr)
        _end(folder, 2)

    watch("vllm", stop)


def _end(folder: str, status: int) -> NoReturn:
    add_status(folder, status)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
