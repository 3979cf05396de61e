"""The project files agree with the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from jetrl_patch._versions import HOME, SUPPORTED, VERSION

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).resolve().parents[2]


def test_the_citation_names_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert str(citation["version"]) == VERSION and citation.get("repository-code", "") == HOME
    assert citation["license"] == "Apache-2.0"


def test_ci_runs_the_quick_tests_with_every_promised_python_and_the_two_commands_of_the_readme() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    runs = jobs["test"]["strategy"]["matrix"]["include"]
    commands = [run["command"] for run in runs]
    readme, setup = ((ROOT / name).read_text() for name in ("README.md", "setup.py"))
    assert commands == ["make quick", "make quick", "make test", "make demo"]
    assert all(command in readme for command in commands[2:])
    quick = [run["python"] for run in runs if run["command"] == "make quick"]
    assert quick == re.findall(r'"Programming Language :: Python :: (3\.\d+)"', setup)
    assert f'python_requires=">={quick[0]}"' in setup


def test_the_pins_of_the_docs_are_complete() -> None:
    # a name without a version is pinned in cpu.txt
    def lines(name: str) -> list[str]:
        text = (ROOT / "requirements" / name).read_text().splitlines()
        return [line for line in text if line and not line.startswith(("#", "-"))]

    pinned = {line.partition("==")[0].lower() for line in lines("cpu.txt")}
    loose = [line for line in lines("docs.txt") if "==" not in line]
    assert not [name for name in loose if name.lower() not in pinned]
    assert not [line for line in lines("docs.txt") if "==" in line and line.partition("==")[0].lower() in pinned]


def test_hooks_run_what_the_environment_holds() -> None:
    repos = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [repo["repo"] for repo in repos] == ["local"]
    assert all(hook["entry"].startswith(".venv/bin/") for hook in repos[0]["hooks"])


def pinned(name: str) -> dict[str, str]:
    """Distribution -> version in a file of ``requirements/``."""
    text = (ROOT / "requirements" / name).read_text()
    return {name.lower(): version for name, version in re.findall(r"^([\w-]+)(?:\[\w+\])?==(\S+)$", text, re.MULTILINE)}


@pytest.mark.parametrize("framework", ["verl", "openrlhf"])
def test_pins_for_gpus_are_supported_and_the_install_page_names_them(framework: str) -> None:
    pins = pinned(f"cuda-{framework}.txt")
    assert {framework, "torch", "vllm", "transformers", "ray"} <= set(pins)
    dockerfile = (ROOT / "docker" / f"{framework}.Dockerfile").read_text()
    (version,) = re.findall(rf"^ARG {framework.upper()}=(.*)$", dockerfile, re.MULTILINE)
    assert version == pins[framework]
    for name in set(pins) & set(SUPPORTED):
        assert pins[name] in SpecifierSet(SUPPORTED[name][0]), name
    page = (ROOT / "docs" / "install.md").read_text()
    assert f"requirements/cuda-{framework}.txt" in page and f"docker/{framework}.Dockerfile" in page


def test_advice_does_not_need_the_project_on_an_index() -> None:
    told = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("*.md"), *ROOT.glob("jetrl_patch/**/*.py"), *ROOT.glob("adapters/**/*.py")]
    assert len(told) > 200
    wrong = re.compile(r"pip install (?!-e)\S*jetrl[-_]patch")
    assert not [str(path) for path in told if wrong.search(path.read_text(encoding="utf-8"))]
