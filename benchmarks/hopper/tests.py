"""Part a: the tests of ``tests/gpu``, a cell for each file and a piece for each test function.

A file runs in one process, which reports as it goes. Where a test ends the process or breaks its device, another process goes on
with the next test.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from benchmarks.gpu.piece import Piece
from benchmarks.hopper.cells import Cell, Cells, Derived, Setup
from tests.gpu.optional import NOT_TRIED

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tests" / "gpu"
OUTCOMES = ("passed", "failed", "refused", "skipped")


def cells(setup: Setup) -> dict[str, Cell]:
    files = sorted(FOLDER.glob("test_*.py"))
    return {file.stem: Cell("Tests", partial(_pieces, file), 240) for file in files}


def _pieces(file: Path, done: Collection[str]) -> Iterator[Piece]:
    functions: dict[str, list[str]] = {}
    for test in collected(file):
        functions.setdefault(function_of(test), []).append(test)
    left = {name: tests for name, tests in functions.items() if name not in done}
    with Session(file, [test for tests in left.values() for test in tests]) as session:
        for name, tests in left.items():
            yield Piece(name, partial(_row, session, file.name, name, tests))


def function_of(test: str) -> str:
    """``name[parameters]`` -> ``name``."""
    return test.partition("[")[0]


def collected(file: Path) -> list[str]:
    """The names of a file's tests, with parameters, in order.

    Raises:
        RuntimeError: the file cannot be imported.
    """
    words = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-m", "", str(file)]
    done = subprocess.run(words, cwd=ROOT, check=False, capture_output=True, text=True)
    found = [line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line and not line.startswith("ERROR")]
    if done.returncode or not found:
        raise RuntimeError(f"pytest could not collect {file.name}: {(done.stdout + done.stderr)[-1000:]}")
    return found


def _row(session: Session, file: str, name: str, tests: Sequence[str]) -> list[dict[str, Any]]:
    return [row(file, name, {test: session.outcome(test) for test in tests})]


def row(file: str, name: str, found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The counts of one function, the names of its tests that failed, and what was not tried or skipped."""
    outcomes = [each["outcome"] for each in found.values()]
    bad = [f"{test}: {each['reason']}" for test, each in found.items() if each["outcome"] == "failed"]
    why = dict.fromkeys(each["reason"].replace(";", ",") for each in found.values() if each["outcome"] == "skipped")
    return {
        "file": file, "test": name, **{outcome: outcomes.count(outcome) for outcome in OUTCOMES},
        "seconds": sum(each["seconds"] for each in found.values()), "failed tests": "; ".join(bad), "why skipped": "; ".join(why),
    }  # fmt: skip


class Session:
    """The outcomes of a file's tests, which run in order in as few processes as they leave alive."""

    def __init__(self, file: Path, tests: Sequence[str]) -> None:
        self.file, self.tests = file, list(tests)
        self._found: dict[str, dict[str, Any]] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._lines: TextIO | None = None
        self._begun = ""  # the last test that the process began

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        if self._process is not None and self._lines is not None:
            self._process.terminate()
            self._process.wait()
            self._lines.close()

    def outcome(self, test: str) -> dict[str, Any]:
        """``outcome``, ``reason`` and ``seconds`` of a test, which runs now unless it has.

        Raises:
            RuntimeError: pytest ended before it began a test.
        """
        while test not in self._found:
            self._go_on(test)
        return self._found[test]

    def _go_on(self, first: str) -> None:
        """Read until ``first`` or the process ends."""
        if self._process is None:
            self._start([test for test in self.tests[self.tests.index(first) :] if test not in self._found])
        assert self._process is not None and self._lines is not None
        for line in self._lines:
            told = json.loads(line)
            self._begun = told.get("begins", self._begun)
            if "test" in told:
                self._note(told)
            elif told.get("ends") == first:
                return
        status = self._process.wait()
        self._process = None
        if not self._begun:
            raise RuntimeError(f"pytest ended with status {status} before {first}")
        if self._begun not in self._found:
            reason = f"it ended its process, status {status}"
            self._note({"test": self._begun, "outcome": "failed", "reason": reason, "seconds": 0.0})

    def _note(self, told: dict[str, Any]) -> None:
        """Keep what was told. Of a test that is told about twice, as when its end fails too, what went wrong stays."""
        before = self._found.get(told["test"], {}).get("outcome")
        if before != "failed":
            self._found[told["test"]] = told

    def _start(self, tests: Sequence[str]) -> None:
        read, write = os.pipe()
        words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "benchmarks.hopper.reports", "-m", ""]
        words += [f"--reports-to={write}", *(f"{self.file}::{test}" for test in tests)]
        self._process = subprocess.Popen(words, cwd=ROOT, pass_fds=(write,))
        os.close(write)
        self._lines, self._begun = os.fdopen(read), ""


def derive(cells: Cells, planned: Sequence[str]) -> list[Derived]:
    rows = [row for found in cells.values() for row in found]
    counts = {outcome: sum(row[outcome] for row in rows) for outcome in OUTCOMES}
    reasons = dict.fromkeys(reason for row in rows for reason in row["why skipped"].split("; ") if reason)
    absent = dict.fromkeys(reason.removeprefix(NOT_TRIED).partition(":")[0] for reason in reasons if reason.startswith(NOT_TRIED))
    whole = set(planned) == {name for name, found in cells.items() if found}
    others = [reason for reason in reasons if not reason.startswith(NOT_TRIED)]
    verdict = "MISSED" if counts["failed"] else "met" if whole and not others and counts["passed"] else "not measured"
    if absent and verdict == "met":
        verdict = f"met; not tried: {', '.join(absent)}"
    found = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    table = [{"target": "every test passes or is refused as it declares", "found": found, "verdict": verdict}]
    why = [{"why tests were skipped": reason} for reason in reasons]
    return [Derived("Target", table), *([Derived("Skipped", why)] if why else [])]
