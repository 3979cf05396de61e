"""The commands of the quick start pass the frameworks' parsers, verl's validation and jetrl_patch's checks."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from jetrl_patch import support
from jetrl_patch.adapters.cpu import detect
from jetrl_patch.doctor import examine, verl
from jetrl_patch.patching import guards
from tests.examples.test_h100 import _verl_accepts, models

__all__ = ["models"]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "quickstart.md"


def commands() -> dict[str, str]:
    """Framework -> its command, as the page has it."""
    return dict(re.findall(r"^(?=jetrl (verl|openrlhf) --fp8)(.*?)^```", PAGE.read_text(), re.M | re.S))


def test_there_is_one_for_each_framework() -> None:
    assert set(commands()) == {"verl", "openrlhf"}


@pytest.mark.parametrize("framework", ["verl", "openrlhf"])
def test_a_run_would_start(framework: str, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # the machine that the page assumes: CUDA build of vLLM, Hopper GPU, flash-attn
    monkeypatch.setattr(detect, "vllm_cpu_version", lambda: None)
    monkeypatch.setattr(support, "check_cuda", lambda: (True, "H100"))
    monkeypatch.setattr(support, "check_hopper", lambda: (True, "H100"))
    real = guards.is_installed
    monkeypatch.setattr(guards, "is_installed", lambda name: name == "flash_attn" or real(name))
    text = commands()[framework].replace("$MODEL", str(models / "qwen3_8b")).replace("$DATA", "/data")
    words = shlex.split(text.replace("\\\n", " "))
    report = examine.examine({}, words)
    assert report.verdict == "a run would start", [check for check in report.checks if check.state == "problem"]
    assert report.config is not None and report.config.align == "linear"
    if framework == "verl":
        _verl_accepts(verl.compose_config(examine.recognise(words).arguments))
