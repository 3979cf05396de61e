"""Part a: the tests of ``tests/gpu``, each function in a process of its own, because a test may end it or break its device."""

from __future__ import annotations

import ast
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.hopper.record import Piece, Record, Setup, Table
from scripts.tables import Row
from tests.gpu.optional import NOT_TRIED

ROOT = Path(__file__).resolve().parents[2]
#: a "refused" test failed as it declares
OUTCOMES = ("passed", "failed", "refused", "skipped")


def pieces(setup: Setup) -> Iterator[Piece]:
    for file in sorted((ROOT / "tests" / "gpu").glob("test_*.py")):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                yield Piece("Tests", f"{file.stem}: {node.name}", partial(run, file, node.name))


def run(file: Path, function: str) -> list[Row]:
    """How many of one function's tests had each outcome, which failed, and why tests were skipped.

    Raises:
        RuntimeError: the file cannot be imported, or a test ended the process.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        words = ["-u", "-m", "pytest", "-v", "-p", "no:cacheprovider", "-m", "", f"--junitxml={report}", f"{file}::{function}"]
        done = subprocess.run([sys.executable, *words], cwd=ROOT, check=False, stdout=subprocess.PIPE, text=True)
        if done.returncode not in (0, 1) or not report.exists():
            raise RuntimeError(f"pytest ended with status {done.returncode}: {done.stdout[-1500:]}")
        cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    found = [(case.get("name"), *outcome_of(case)) for case in cases]
    counts = Counter(outcome for _, outcome, _ in found)
    skipped = dict.fromkeys(reason.replace(";", ",") for _, outcome, reason in found if outcome == "skipped")
    return [
        {
            "file": file.name, "test": function, **{outcome: counts[outcome] for outcome in OUTCOMES},
            "seconds": sum(float(case.get("time", 0)) for case in cases),
            "failed tests": "; ".join(f"{name}: {reason}" for name, outcome, reason in found if outcome == "failed"),
            "why skipped": "; ".join(skipped),
        }
    ]  # fmt: skip


def outcome_of(case: ElementTree.Element) -> tuple[str, str]:
    """Outcome and reason, from pytest's report. An error in set-up or tear-down counts as a failure."""
    for wrong in (*case.iter("failure"), *case.iter("error")):
        return "failed", (wrong.get("message") or "no message").splitlines()[0][:300]
    for skipped in case.iter("skipped"):
        return "refused" if skipped.get("type") == "pytest.xfail" else "skipped", skipped.get("message", "")
    return "passed", ""


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
    target = [{"target": "every test passes, or is refused as it declares", "found": found, "verdict": verdict}]
    return [("Target", target, ""), ("Skipped", [{"why tests were skipped": reason} for reason in reasons], "")]
