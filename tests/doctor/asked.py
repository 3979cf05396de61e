"""``jetrl doctor`` as a user asks it, commands to ask about, machines with GPUs, and installations that lack something."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from jetrl_patch import registry
from jetrl_patch.adapters import cpu
from jetrl_patch.backends import capability
from jetrl_patch.cli.doctor import examine
from jetrl_patch.cli.main import app
from jetrl_patch.native import machine as support
from jetrl_patch.patching import guards
from tests.doctor import judged


def verl(model: Path, *extra: str) -> list[str]:
    return [sys.executable, "-m", "verl.trainer.main_ppo", *judged.verl(model, *extra, gpus=1)]


def openrlhf(model: Path, *extra: str) -> list[str]:
    return ["jetrl", "openrlhf", "--fp8-unified", *judged.openrlhf(model, *extra, gpus=1)]


def doctor(*words: str, status: int | None = None) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["doctor", "--json", *words])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    found: dict[str, Any] = json.loads(result.stdout)
    assert result.exit_code == {True: 0, False: 1, None: 2}[found["starts"]]
    if status is not None:
        assert result.exit_code == status, [c for c in found["checks"] if c["state"] == "problem"]
    return found


def named(found: dict[str, Any], name: str) -> dict[str, str]:
    (check,) = [check for check in found["checks"] if check["name"] == name]
    return check  # type: ignore[no-any-return]


def eight_gpus(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Pretend that the machine has eight Hopper GPUs of this name, and a CUDA build of vLLM."""
    monkeypatch.setattr(cpu, "vllm_cpu_version", lambda: None)
    monkeypatch.setattr(support, "check_cuda", lambda: (True, name))
    for module in (support, capability):
        monkeypatch.setattr(module, "check_hopper", lambda *sm: (True, name))
    monkeypatch.setattr(support, "count_gpus", lambda: 8)


def without(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    version, importable = guards.installed_version, guards.is_installed
    monkeypatch.setattr(guards, "installed_version", lambda asked: None if asked in names else version(asked))
    for module in (guards, support, registry, examine):
        monkeypatch.setattr(module, "is_installed", lambda asked: asked not in names and importable(asked))

