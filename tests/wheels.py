"""Build and install wheels as a user does, without an index and without dependencies."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


def run(*command: str, cwd: Path) -> str:
    """Run a command without this process's Python, plugin and coverage settings. Return what it printed; it must succeed."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "JETRL_", "COV"))}
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environ)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(source: Path, folder: Path) -> Path:
    """The wheel of a source folder, written to ``folder``. Building leaves files in the source."""
    run(*_PIP, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder), str(source), cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


def install(wheel: Path, target: Path) -> Path:
    """Install a wheel into the folder ``target``, for PYTHONPATH."""
    run(*_PIP, "install", "--quiet", "--no-deps", "--target", str(target), str(wheel), cwd=wheel.parent)
    return target
