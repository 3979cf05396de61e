"""Part a: the tests of ``tests/gpu``, a cell for each file."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.hopper.cells import Cell, Cells, Derived, Setup

ROOT = Path(__file__).resolve().parents[2]


def cells(setup: Setup) -> dict[str, Cell]:
    files = sorted((ROOT / "tests" / "gpu").glob("test_*.py"))
    return {file.stem: Cell("Files", lambda file=file: _run(file), 240) for file in files}  # type: ignore[misc]


def _run(file: Path) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={found}", str(file)]
        done = subprocess.run(command, cwd=ROOT, check=False)
        if not found.exists():
            raise RuntimeError(f"pytest ended with status {done.returncode} and without a result")
        yield read(file.name, ElementTree.parse(found).getroot())


def read(name: str, root: ElementTree.Element) -> dict[str, Any]:
    """The counts of one run, and the names of tests that failed."""
    suite = next(root.iter("testsuite"))
    wrong, skipped = int(suite.get("failures", 0)) + int(suite.get("errors", 0)), int(suite.get("skipped", 0))
    bad = [c.get("name", "") for c in root.iter("testcase") if c.find("failure") is not None or c.find("error") is not None]
    return {
        "file": name, "passed": int(suite.get("tests", 0)) - wrong - skipped, "failed": wrong, "skipped": skipped,
        "seconds": float(suite.get("time", 0)), "failed tests": ", ".join(bad),
    }  # fmt: skip


def derive(cells: Cells, planned: Sequence[str]) -> list[Derived]:
    rows = [row for found in cells.values() for row in found]
    failed, skipped = (sum(row[key] for row in rows) for key in ("failed", "skipped"))
    complete = set(planned) == {name for name, found in cells.items() if found}
    verdict = "MISSED" if failed else "met" if complete and not skipped else "not measured"
    found = f"{failed} failed, {skipped} skipped"
    return [Derived("Target", [{"target": "every test passes", "found": found, "verdict": verdict}])]
