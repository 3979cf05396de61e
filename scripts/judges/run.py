"""Run one suite in one arm, in a process and a working directory of its own."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from jetrl_patch.patching.guards import installed_version
from scripts.judges import hub, models
from scripts.judges.suites import ARMS, Suite
from tests.vision_models import VISION

__all__ = ["Outcome", "Run", "own_folders", "run"]

ROOT = Path(__file__).resolve().parents[2]
_NAMES = "names"
#: what all arms share
_ENVIRON = {
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "RAY_USAGE_STATS_ENABLED": "0", "TOKENIZERS_PARALLELISM": "false",
    "OMP_WAIT_POLICY": "PASSIVE", "TORCHAO_FORCE_SKIP_LOADING_SO_FILES": "1", "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_USE_AOT_COMPILE": "0",
}  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """``passed``, ``failed``, ``error`` or ``skipped``, and the first line of pytest's message."""

    verdict: str
    message: str = ""


@dataclass(frozen=True)
class Run:
    """Outcomes by test, and the seconds of the whole process."""

    outcomes: dict[str, Outcome]
    seconds: float


def run(suite: Suite, arm: str, checkout: Path, packages: Path, folder: Path) -> Run:
    """Run the tests of ``suite``. ``packages``: what `make judges` installed. ``folder`` keeps models, working directory and log.

    Raises:
        RuntimeError: pytest wrote no results.
    """
    place = folder / f"{suite.name} {arm}".replace(" ", "-").replace(",", "")
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    _furnish(place, suite, checkout)
    report, log = place / "results.xml", place / "log.txt"
    environ = {name: value for name, value in os.environ.items() if not name.startswith("JETRL_")}
    programs = f"{Path(sys.executable).parent}{os.pathsep}{environ.get('PATH', '')}"  # they start `vllm serve`
    environ |= {**_ENVIRON, "PATH": programs, "PYTHONPATH": _path(suite, packages, place), **suite.environ, **ARMS[arm]}
    if suite.model:
        variable = "VLLM_VLM_TEST_MODEL" if models.sees(suite.model) else "VLLM_TEST_MODEL"
        environ[variable] = str(models.write(folder / "models", suite.model))
    command = [
        sys.executable, "-m", "pytest", *files(place, suite), f"--rootdir={place}", "-q", "--timeout", str(suite.limit),
        "-p", "no:cacheprovider", "--continue-on-collection-errors", f"--junitxml={report}", *suite.options,
        *(["-k", suite.select] if suite.select else []),
    ]  # fmt: skip
    begin = time.monotonic()
    with log.open("w") as output:
        done = subprocess.run(command, cwd=place, env=environ, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    if not report.is_file():
        raise RuntimeError(f"{suite.name}, {arm}: pytest ended with status {done.returncode} and without results. See {log}.")
    return Run(outcomes(report), time.monotonic() - begin)


def files(place: Path, suite: Suite) -> list[str]:
    """The test files below ``place``, as paths from there, each once."""
    found = dict.fromkeys(str(path.relative_to(place)) for pattern in suite.tests for path in sorted(place.glob(pattern)))
    return [path for path in found if not any(part in path for part in suite.without)]


def outcomes(report: Path) -> dict[str, Outcome]:
    """Outcomes by name, from a report as JUnit writes it."""
    found: dict[str, Outcome] = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        verdict = Outcome("passed")
        for tag, word in (("failure", "failed"), ("error", "error"), ("skipped", "skipped")):
            if (element := case.find(tag)) is not None:
                verdict = Outcome(word, (element.get("message") or "").strip().split("\n")[0][:300])
        if name not in found or found[name].verdict == "passed":  # an error while it is torn down is a second case
            found[name] = verdict
    return found


def _furnish(place: Path, suite: Suite, checkout: Path) -> None:
    """What the tests look for in their working directory; the framework's own sources stay out of it."""
    for name in ("tests", *suite.copied):
        shutil.copytree(checkout / name, place / name, symlinks=True)
    if (checkout / "pyproject.toml").is_file():
        shutil.copy(checkout / "pyproject.toml", place)
    if suite.linked:
        link = place / suite.linked
        spec = importlib.util.find_spec(link.name)
        assert spec is not None and spec.submodule_search_locations
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(spec.submodule_search_locations[0])
    if suite.hub:
        hub.write(place)
    # verl and the program `vllm` ask for the version of vllm; the distribution for CPUs is vllm-cpu
    metadata = place / _NAMES / "vllm.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {installed_version('vllm')}+cpu\n")


def own_folders(suite: Suite) -> list[str]:
    """The folder of a framework that is installed beside the environment, as TRL is; none for the others."""
    folder = Path(sys.prefix) / suite.judged
    return [str(folder)] if folder.is_dir() else []


def _path(suite: Suite, packages: Path, place: Path) -> str:
    vision = [str(VISION)] if models.sees(suite.model) else []
    return os.pathsep.join([str(packages), *own_folders(suite), *vision, str(place / _NAMES), str(ROOT)])
