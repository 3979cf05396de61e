"""Build the site once for all its tests, with the command of the Makefile."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

Build = Callable[[Path, Path], "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def build() -> Build:
    """A function ``build(folder, root)`` that builds the site of a copy of the repository."""
    pytest.importorskip("mkdocs")
    (arguments,) = re.findall(r"-m mkdocs (.*)", (ROOT / "Makefile").read_text())

    def run(folder: Path, root: Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "mkdocs", *arguments.split(), "--site-dir", str(folder)]
        environ = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
        return subprocess.run(command, cwd=root, env=environ, capture_output=True, text=True)

    return run


@pytest.fixture(scope="session")
def site_folder(build: Build, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(folder, ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder
