"""Part a: the tests of ``tests/gpu``, each function in a process of its own, which it may end or whose device it may break."""

from __future__ import annotations

import ast
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from benchmarks.harness import Row
from benchmarks.hopper.record import Record, Table
from benchmarks.hopper.worker import Piece, Setup
from tests.gpu.optional import NOT_TRIED

ROOT = Path(__file__).resolve().parents[2]
OUTCOMES = ("passed", "failed", "refused", "skipped")


def pieces(setup: Setup) -> Iterator[Piece]:
    for file in sorted((ROOT / "tests" / "gpu").glob("test_*.py")):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                yield Piece("Tests", f"{file.stem}: {node.name}", partial(run, file, node.name))


class Outcome(NamedTuple):
    """What a test did: ``refused`` is an expected failure, which a test declares."""

    test: str
    outcome: str
    reason: str = ""


def run(file: Path, function: str) -> list[Row]:
    """Counts of one function's tests, the names of those that failed, and why tests were skipped.

    Raises:
        RuntimeError: it could not be imported, or it ended its process.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        words = ["-u", "-m", "pytest", "-v", "-p", "no:cacheprovider", "-m", "", f"--junitxml={report}", f"{file}::{function}"]
        done = subprocess.run([sys.executable, *words], cwd=ROOT, check=False, stdout=subprocess.PIPE, text=True)
        if done.returncode not in (0, 1) or not report.exists():
            raise RuntimeError(f"pytest ended with status {done.returncode}: {done.stdout[-1500:]}")
        suite = ElementTree.parse(report).getroot()
    found = [outcome_of(case) for case in suite.iter("testcase")]
    counts = {outcome: sum(each.outcome == outcome for each in found) for outcome in OUTCOMES}
    failed = [f"{each.test}: {each.reason}" for each in found if each.outcome == "failed"]
    skipped = dict.fromkeys(each.reason.replace(";", ",") for each in found if each.outcome == "skipped")
    seconds = sum(float(case.get("time", 0)) for case in suite.iter("testcase"))
    head = {"file": file.name, "test": function}
    return [{**head, **counts, "seconds": seconds, "failed tests": "; ".join(failed), "why skipped": "; ".join(skipped)}]


def outcome_of(case: ElementTree.Element) -> Outcome:
    """From pytest's report. Of set-up, call and end, what went wrong counts."""
    name = case.get("name", "")
    for wrong in (*case.iter("failure"), *case.iter("error")):
        return Outcome(name, "failed", (wrong.get("message") or "no message").splitlines()[0][:300])
    for skipped in case.iter("skipped"):
        refused = skipped.get("type") == "pytest.xfail"
        return Outcome(name, "refused" if refused else "skipped", skipped.get("message", ""))
    return Outcome(name, "passed")


def derive(record: Record) -> list[Table]:
    rows = [row for found in record.rows.values() for row in found]
    counts = {outcome: sum(row[outcome] for row in rows) for outcome in OUTCOMES}
    reasons = list(dict.fromkeys(reason for row in rows for reason in row["why skipped"].split("; ") if reason))
    absent = dict.fromkeys(reason.removeprefix(NOT_TRIED).partition(":")[0] for reason in reasons if reason.startswith(NOT_TRIED))
    whole = record.complete and all(reason.startswith(NOT_TRIED) for reason in reasons)
    verdict = "MISSED" if counts["failed"] or record.errors else "met" if whole and counts["passed"] else "not measured"
    if absent and verdict == "met":
        verdict = f"met; not tried: {', '.join(absent)}"
    found = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    target = [{"target": "every test passes or is refused as it declares", "found": found, "verdict": verdict}]
    return [("Target", target, ""), ("Skipped", [{"why tests were skipped": reason} for reason in reasons], "")]
