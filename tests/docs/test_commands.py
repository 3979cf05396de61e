"""The commands of the quick start pass the frameworks' parsers, verl's validation and jetrl_patch's checks."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from jetrl_patch import registry
from jetrl_patch.doctor import examine
from tests.examples.test_h100 import _verl_accepts, models, target

__all__ = ["models", "target"]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "quickstart.md"


def commands() -> dict[str, str]:
    """Framework -> its command, as the page has it."""
    return dict(re.findall(r"^(?=jetrl (verl|openrlhf) --fp8)(.*?)^```", PAGE.read_text(), re.M | re.S))


def test_there_is_one_for_each_framework() -> None:
    assert set(commands()) == {"verl", "openrlhf"}


@pytest.mark.usefixtures("target")
@pytest.mark.parametrize("framework", ["verl", "openrlhf"])
def test_a_run_would_start(framework: str, models: Path) -> None:
    text = commands()[framework].replace("$MODEL", str(models / "qwen3_8b")).replace("$DATA", "/data")
    words = shlex.split(text.replace("\\\n", " "))
    report = examine.examine({}, words)
    assert report.verdict == "a run would start", [check for check in report.checks if check.state == "problem"]
    assert report.config is not None and report.config.align == "linear"
    if framework == "verl":
        _verl_accepts(registry.trainer("verl").read(examine.recognise(words).arguments))
