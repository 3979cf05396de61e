"""A process under ``jetrl doctor --follow``: its command is examined, and if it starts a training, the process ends there."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from typing import Any

from jetrl_patch.config.environment import FOLLOW
from jetrl_patch.config.following import ANOTHER, end, read_options
from jetrl_patch.patching.patch import watch


def examine(folder: str) -> None:
    """Ask a doctor about this process's command. Return if it starts no training; then no engine of vLLM may be built, either."""
    environ = {name: value for name, value in os.environ.items() if name != FOLLOW}
    words = [sys.executable, "-m", "jetrl_patch", "doctor", *read_options(folder), "--instead", "--", *sys.orig_argv]
    status = subprocess.run(words, env=environ).returncode
    if status != ANOTHER:
        end(folder, status)

    def stop(*_: Any, **__: Any) -> None:
        command = shlex.join(sys.orig_argv)
        words = f"jetrl doctor: `{command}` builds a vLLM engine, and no adapter has examined it, so it ends here"
        print(words, file=sys.stderr)
        end(folder, 2)

    def refuse_engines(module: Any) -> None:
        module.EngineArgs.create_engine_config = stop  # this process ends under it

    watch("vllm.engine.arg_utils", refuse_engines)
