"""``jetrl doctor --follow`` runs a script up to the training program, and examines that in its place."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples.words import CHECKPOINT

VERL = "verl.trainer.main_ppo"


def follow(folder: Path, *lines: str) -> subprocess.CompletedProcess[str]:
    """Follow a script of these lines, which gets one argument."""
    script = folder / "train.sh"
    script.write_text("\n".join(["set -euo pipefail", *lines, ""]))
    environ = {name: value for name, value in os.environ.items() if not name.startswith("JETRL_")}
    return subprocess.run(
        [sys.executable, "-m", "jetrl_patch", "doctor", "--follow", "--", "bash", script.name, "trainer.nnodes=3"],
        capture_output=True, text=True, cwd=folder, timeout=500, env={**environ, "PYTHON": sys.executable},
    )  # fmt: skip


@pytest.mark.timeout(600)
def test_the_training_is_examined_and_not_started(tmp_path: Path) -> None:
    """With the script's own variables and arguments. Other programs run, also those that import torch."""
    done = follow(
        tmp_path, "$PYTHON -c 'import torch; open(\"before\", \"w\")'", "export JETRL_PRECISION=fp8-unified",
        f"$PYTHON -m {VERL} data.train_files=/nowhere/train.parquet \"$@\" 2>&1 | tee log", "touch after",
    )  # fmt: skip
    said = " ".join(done.stdout.split())
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"{VERL}, 2 arguments read" in said and "the environment enables jetrl_patch" in said
    assert "/nowhere/train.parquet" in said and "3 nodes" in said
    assert (tmp_path / "before").exists() and not (tmp_path / "after").exists()


@pytest.mark.timeout(600)
def test_a_program_of_ones_own_ends_before_it_has_an_engine(tmp_path: Path) -> None:
    lines = f"import torch\nimport vllm\nvllm.LLM({str(CHECKPOINT)!r})\nopen('trained', 'w')\n"
    (tmp_path / "train.py").write_text(lines)
    done = follow(tmp_path, "$PYTHON train.py")
    assert done.returncode == 2 and "train.py` builds a vLLM engine, and no adapter has examined it" in done.stderr
    assert not (tmp_path / "trained").exists()


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("true", "required a command that starts a program of openrlhf or trl or verl, found none until it ended with status 0"),
        ("cd . && sbatch job.slurm", "required a script that starts the training itself, found `sbatch` in line 2 of train.sh."),
        ("ray  job submit -- python -m x", "required a script that starts the training itself, found `ray  job submit` in"),
    ],
)
def test_what_cannot_be_followed(tmp_path: Path, line: str, says: str) -> None:
    done = follow(tmp_path, line)
    assert done.returncode == 2 and done.stderr.startswith(f"jetrl: ConfigError: jetrl doctor --follow: {says}"), done.stderr
