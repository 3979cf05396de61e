"""The commands of the framework pages and of the ten minutes pass the frameworks' parsers and jetrl_patch's checks."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from examples import ten_minutes
from jetrl_patch import registry
from jetrl_patch._versions import PROGRAMS
from jetrl_patch.cli.doctor import examine
from tests.examples.test_h100 import _verl_accepts, models, target

__all__ = ["models", "target"]

DOCS = Path(__file__).resolve().parents[2] / "docs"


def command(framework: str) -> str:
    """The complete command on a framework's page."""
    page = (DOCS / f"{framework}.md").read_text()
    (found,) = re.findall(rf"^(?=jetrl {framework} --fp8-unified \\$)(.*?)^```", page, re.M | re.S)
    return str(found)


@pytest.mark.usefixtures("target")
@pytest.mark.parametrize("framework", ["verl", "openrlhf"])
def test_a_run_would_start(framework: str, models: Path) -> None:
    text = command(framework).replace("$MODEL", str(models / "qwen3_8b")).replace("$DATA", "/data")
    words = shlex.split(text.replace("\\\n", " "))
    report = examine.examine({}, words)
    assert report.verdict == "a run would start", [check for check in report.checks if check.state == "problem"]
    assert report.config is not None and report.config.exact
    if framework == "verl":
        config = registry.launches("verl").read(examine.recognise(words).arguments)
        _verl_accepts(config)
        assert config.actor_rollout_ref.rollout.tensor_model_parallel_size == 1
        assert (config.trainer.total_epochs, config.trainer.save_freq, config.trainer.test_freq) == (2, 50, 10)


@pytest.mark.parametrize("framework", ["verl", "openrlhf"])
def test_the_toy_run_of_the_ten_minutes_would_start(framework: str, tmp_path: Path) -> None:
    toy = tmp_path / "toy.sh"
    toy.write_text(ten_minutes.script(framework, tmp_path).replace("exec python", 'printf "%s\\0"'))
    said = subprocess.run(["bash", str(toy), "one=more"], capture_output=True, text=True, check=True).stdout
    _m, program, *words, last = said.split("\0")[:-1]
    assert (program, last) == (PROGRAMS[framework], "one=more")
    assert words == ten_minutes.arguments(framework, tmp_path)
    report = examine.examine({}, ["jetrl", framework, "--fp8-unified", *words])
    assert report.verdict == "a run would start", [check for check in report.checks if check.state == "problem"]
    if framework == "verl":  # whose output the pages show
        lines = examine._patches(report).splitlines()
        assert all(line in (DOCS / "ten-minutes.md").read_text() for line in lines)
        assert lines[0] in (DOCS / "launcher.md").read_text()
