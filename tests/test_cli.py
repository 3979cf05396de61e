"""``jetrl``: status, delegation, errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import ModuleType

import pytest
from typer.testing import CliRunner

from jetrl_patch._versions import SUPPORTED
from jetrl_patch.cli.main import app
from jetrl_patch.patching import guards
from jetrl_patch.patching.identity import identity


def test_status_as_a_table_and_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    text = CliRunner().invoke(app, ["doctor", "--status"])
    assert text.exit_code == 0
    assert all(name in text.output for name in SUPPORTED)
    assert "off: no JETRL_PRECISION in the environment" in text.output
    monkeypatch.setenv("JETRL_PRECISION", "bf16")
    result = json.loads(CliRunner().invoke(app, ["doctor", "--status", "--json"]).output)
    assert result["config"]["precision"] == "bf16"
    assert set(result["frameworks"]) == set(SUPPORTED)
    assert result["frameworks"]["vllm"]["state"] == "ok"
    repairs = [patch for patch in result["patches"] if patch["fixes"]]
    assert repairs and all(patch["needed_by"] for patch in repairs) and len(repairs) < len(result["patches"])
    text = CliRunner().invoke(app, ["doctor", "--status"])
    assert f"{len(repairs)} of them fix bugs of other projects" in text.output


def test_status_in_three_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    def said(**environ: str) -> list[str]:
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        result = CliRunner().invoke(app, ["status"])
        assert result.exit_code == 0
        return result.output.splitlines()

    first, second, third = said()
    assert first.startswith(f"jetrl_patch {identity()}, Python ") and third == "off: no JETRL_PRECISION in the environment"
    assert second.startswith("ok: torch ") and all(name in second for name in SUPPORTED)
    assert said(JETRL_PRECISION="fp8-unified", JETRL_KV_CACHE="fp8")[2] == "on: precision fp8-unified, align exact, kv_cache fp8"
    assert said(JETRL_ENABLED="0")[2] == "off: JETRL_ENABLED=0 in the environment"


def test_the_version_is_the_package_s() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"jetrl_patch {identity()}\n")


def test_status_fails_where_a_version_is_not_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "installed_version", lambda _: "0.0.1")
    for command in (["doctor", "--status"], ["status"]):
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 1
        assert "unsupported" in result.output


def test_parity_gets_the_arguments_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = ModuleType("jetrl_patch.cli.parity.cli")
    seen: list[list[str]] = []

    def main(arguments: list[str]) -> int:
        seen.append(arguments)
        return 1

    fake.main = main  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "jetrl_patch.cli.parity.cli", fake)
    result = CliRunner().invoke(app, ["parity", "--model", "folder", "--tp", "2", "--help"])
    assert result.exit_code == 1
    assert seen == [["--model", "folder", "--tp", "2", "--help"]]


def test_an_error_of_the_project_is_one_line_and_status_2() -> None:
    environ = {"PATH": os.environ["PATH"], "JETRL_PRECISION": "fp9"}
    command = [sys.executable, "-m", "jetrl_patch.cli.main", "doctor", "--status"]
    run = subprocess.run(command, capture_output=True, text=True, env=environ, cwd="/")
    assert run.returncode == 2
    assert run.stdout == ""
    assert run.stderr.startswith("jetrl: ConfigError: unknown precision 'fp9'")
    assert run.stderr.count("\n") == 1
