"""An adapter in a package of its own: installed from its wheel, it makes a framework exact that this repository does not know."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from examples.words import CHECKPOINT
from tests.wheels import build, install

ROOT = Path(__file__).resolve().parents[2]
STEPS = 3

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]


def run(*words: str, path: Path | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("JETRL_", "PYTHONPATH"))}
    more = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1", **environ}
    clean |= more | ({"PYTHONPATH": str(path)} if path else {})
    return subprocess.run(words, cwd="/", env=clean, capture_output=True, text=True)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package, from its wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "own_adapter"
    shutil.copytree(ROOT / "examples" / "own_adapter", source, ignore=shutil.ignore_patterns("__pycache__"))
    return install(build(source, folder), folder / "target")


def steps(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = [ast.literal_eval(line) for line in done.stdout.splitlines() if line.startswith("{'step'")]
    assert len(found) == STEPS
    return found


def test_every_token_is_equal_with_the_launcher_of_its_own(installed: Path) -> None:
    done = run(sys.executable, "-m", "jetrl_patch", "tinyrl", "--fp8-unified", str(CHECKPOINT), str(STEPS), path=installed)
    found = steps(done)
    assert [step["difference"] for step in found] == [0.0] * STEPS
    assert sum(step["tokens"] for step in found) >= 2000


@pytest.mark.slow
def test_without_the_plugin_the_two_sides_differ(installed: Path) -> None:
    found = steps(run(sys.executable, "-m", "tinyrl", str(CHECKPOINT), str(STEPS), path=installed))
    assert all(step["difference"] > 0 for step in found)


def test_the_doctor_and_the_usage_know_it(installed: Path) -> None:
    command = [sys.executable, "-m", "jetrl_patch"]
    assert "jetrl tinyrl [OPTIONS] ARGS...        the same as: jetrl run -m tinyrl" in run(
        *command, "run", "--help", path=installed
    ).stdout
    said = run(*command, "doctor", "--json", "--", "jetrl", "tinyrl", "--fp8-unified", "model", path=installed).stdout
    assert "the adapter of tinyrl does not read its arguments" in said and "tinyrl.Trainer.sync" in said
    assert "with tinyrl 1.0" in run(*command, "--version", path=installed).stdout


def test_the_page_shows_both_files() -> None:
    page = (ROOT / "docs" / "extending.md").read_text()
    files = sorted((ROOT / "examples" / "own_adapter").glob("*.*"))
    assert [file.name for file in files if file.suffix] == ["pyproject.toml", "tinyrl.py", "tinyrl_jetrl.py"]
    assert all(f'--8<-- "examples/own_adapter/{file.name}"' in page for file in files)
    assert sum(len(file.read_text().splitlines()) for file in files if file.suffix == ".py") <= 160
