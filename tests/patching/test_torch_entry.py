"""The variable in front of any command: every process that imports torch is patched, or stops."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from jetrl_patch import session
from jetrl_patch.config import environment

SEEN = "import sys, torch; s = sys.modules.get('jetrl_patch.session'); print(s and s.is_active())"


def run(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("JETRL_", "COV"))}
    return subprocess.run([sys.executable, "-c", code], env={**clean, **environ}, cwd="/", capture_output=True, text=True)


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({}, "None"),  # not even imported
        ({"JETRL_PRECISION": "fp8-unified"}, "True"),
        ({"JETRL_ENABLED": "1"}, "True"),
        ({"JETRL_ENABLED": "0", "JETRL_PRECISION": "fp8-unified"}, "False"),
        ({"JETRL_ALIGN": "linear"}, "False"),
    ],
)
def test_what_the_environment_asks_for_is_what_happens(environ: dict[str, str], said: str) -> None:
    done = run(SEEN, **environ)
    assert done.returncode == 0 and done.stdout.strip() == said, done.stderr


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({"JETRL_PRECISON": "fp8-unified"}, "unknown environment variable JETRL_PRECISON"),
        ({"JETRL_PRECISION": "fp9"}, "unknown precision 'fp9'"),
    ],
)
def test_a_mistake_stops_the_process(environ: dict[str, str], says: str) -> None:
    done = run(SEEN, **environ)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.splitlines()[-1].startswith(f"jetrl_patch.errors.PluginFailed: ConfigError: {says}")


def test_a_script_may_ask_for_the_same_and_not_for_another() -> None:
    code = "import torch, jetrl_patch; jetrl_patch.enable({})"
    assert run(code.format("align='exact'"), JETRL_PRECISION="fp8-unified").returncode == 0
    what = "jetrl_patch.errors.ConflictError: enable() in a process that is already enabled: required "
    for asked, found in (("align='linear'", "align='exact'"), ("precision='bf16'", "precision='fp8-unified'")):
        done = run(code.format(asked), JETRL_PRECISION="fp8-unified")
        assert done.stderr.splitlines()[-1].startswith(f"{what}{asked}, found {found}. "), done.stderr


def test_a_command_that_only_looks_is_not_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JETRL_PRECISION", "fp8-unified")
    with environment.only_looking():
        assert not session.activate_from_env() and not session.is_active()
    assert session.activate_from_env() and session.is_active()


@pytest.mark.parametrize("module", ["jetrl_patch.loop", "jetrl_patch.fp8.scaling", "jetrl_patch.exact.dispatch"])
def test_a_module_of_ours_may_be_the_first_that_imports_torch(module: str) -> None:
    """It is not complete when torch calls the entry point, which needs it: the process is patched once it is."""
    seen = f"import {module}, jetrl_patch; print(jetrl_patch.status().enabled)"
    done = run(seen, JETRL_PRECISION="fp8-unified")
    assert done.returncode == 0 and done.stdout.strip() == "True", done.stderr
    assert run(seen, JETRL_PRECISION="fp9").stderr.splitlines()[-1].startswith("jetrl_patch.errors.PluginFailed: ConfigError")
