"""Part a: the tests of ``tests/gpu``, each function in a process of its own, because a test may end it or break its device."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.hopper.plan import Setup
from benchmarks.hopper.record import MISSED, ROOT
from scripts.tables import Row
from tests.gpu.optional import NOT_TRIED


def pieces(dry: bool) -> list[str]:
    """Functions; a dry run, in which all are skipped, takes the folder."""
    files = {f"tests/gpu/{file.name}": file.read_text() for file in sorted((ROOT / "tests" / "gpu").glob("test_*.py"))}
    functions = [f"{file}::{name}" for file, text in files.items() for name in re.findall(r"(?m)^def (test_\w+)", text)]
    return ["tests/gpu"] if dry else functions


def measure(name: str, setup: Setup) -> list[Row]:
    """How many of the tests had each outcome, which failed, and why tests were skipped. A "refused" test failed as it declares.

    Raises:
        RuntimeError: the file cannot be imported, or a test ended the process.
    """
    report = setup.scratch / f"{re.sub('[^a-z0-9]+', '-', name)}.xml"  # of this piece: others run at the same time
    report.unlink(missing_ok=True)
    command = [sys.executable, "-um", "pytest", "-v", "-p", "no:cacheprovider", "-m", "", f"--junitxml={report}", name]
    done = subprocess.run(command, cwd=ROOT, check=False, stdout=subprocess.PIPE, text=True)
    if done.returncode not in (0, 1) or not report.exists():
        raise RuntimeError(f"pytest ended with status {done.returncode}: {done.stdout[-1500:]}")
    return [outcomes(name, report)]


def outcomes(name: str, report: Path) -> Row:
    """The row of a report. An error in set-up or tear-down counts as a failure."""
    failed, refused, skipped, passed = {}, [], [], 0
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        wrong = next(iter([*case.iter("failure"), *case.iter("error")]), None)
        skip = case.find("skipped")
        if wrong is not None:
            failed[case.get("name")] = (wrong.get("message") or "no message").splitlines()[0][:300]
        elif skip is None:
            passed += 1
        else:
            (refused if skip.get("type") == "pytest.xfail" else skipped).append(skip.get("message", ""))
    tried = all(reason.startswith(NOT_TRIED) for reason in skipped) and passed + len(refused)
    return {
        "test": name, "passed": passed, "failed": len(failed), "refused": len(refused), "skipped": len(skipped),
        "verdict": MISSED if failed else "met" if tried else "not measured",
        "failed tests": "; ".join(f"{name}: {reason}" for name, reason in failed.items()),
        "why skipped": "; ".join(dict.fromkeys(skipped)),
    }  # fmt: skip
