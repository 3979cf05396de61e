"""verl's plugin entry point: verl swallows plugin exceptions, but a run must not continue unpatched."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def python(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("JETRL_", "VERL_"))}
    return subprocess.run(
        [sys.executable, "-c", code], env={**clean, **environ}, capture_output=True, text=True, timeout=500
    )


STATUS = "import verl, jetrl_patch; print('enabled', jetrl_patch.status().enabled)"


@pytest.mark.slow
def test_does_nothing_unless_opted_in():
    done = python(STATUS)
    assert done.returncode == 0 and "enabled False" in done.stdout, done.stderr


@pytest.mark.slow
def test_patches_a_process_that_imports_verl():
    done = python(STATUS, JETRL_PRECISION="fp8-unified")
    assert done.returncode == 0 and "enabled True" in done.stdout, done.stderr


@pytest.mark.slow
def test_a_plugin_that_fails_fails_the_import_of_verl():
    done = python(STATUS, JETRL_PRECISION="fp8-unifed")
    assert done.returncode != 0 and "enabled" not in done.stdout
    assert "PluginFailed: ConfigError: unknown precision 'fp8-unifed'" in done.stderr


@pytest.mark.slow
def test_a_contradicting_platform_fails_the_import_of_verl():
    done = python(STATUS, JETRL_PRECISION="bf16", JETRL_PLATFORM="cpu", VERL_PLATFORM="nvidia")
    assert done.returncode != 0 and "VERL_PLATFORM: required cpu" in done.stderr
