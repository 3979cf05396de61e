"""Judge the plugin by the test suites of others: ``python -m scripts.judges --vllm DIR --verl DIR`` (``make judges``).

Each suite runs without the plugin and with it. A test that ends differently needs an entry in ``explained.py``, else the exit
status is 1, as it is if no test of a suite passes in either arm. In suites whose tests disturb one another it runs once more
first, its file alone, in both arms. Finished runs are kept in ``--out``, and a later call continues there.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import time
from collections import Counter
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from jetrl_patch.patching.guards import installed_version
from scripts.judges.explained import reason
from scripts.judges.run import ROOT, Outcome, Run, own_folders, run
from scripts.judges.suites import STOCK, SUITES, Suite
from scripts.tables import filled, markdown, processor

RESULTS = Path(__file__).with_name("results.json")
PAGE = ROOT / "docs" / "judges.md"


def commit(checkout: Path) -> str:
    """A checkout's commit and its date, or the version of an unpacked source distribution."""
    if (about := checkout / "PKG-INFO").is_file():
        return next(line for line in about.read_text().splitlines() if line.startswith("Version: ")).removeprefix("Version: ")
    words = ["git", "-C", str(checkout), "log", "-1", "--format=%h of %cs"]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()


def kept(suite: Suite, arm: str, checkout: Path, args: argparse.Namespace, tests: tuple[str, ...] = ()) -> Run:
    """Run a suite, or some of its files, unless its results are kept already."""
    part = dataclasses.replace(suite, name=f"{suite.name} again", tests=tests) if tests else suite
    file = args.out / "runs" / f"{part.name} {arm}.json"
    which = {"commit": commit(checkout), "tests": list(part.tests), "select": part.select}
    if file.is_file() and not args.fresh:
        found = json.loads(file.read_text())
        if all(found.get(key) == value for key, value in which.items()):
            return Run({name: Outcome(*outcome) for name, outcome in found["outcomes"].items()}, found["seconds"])
    print(f"{part.name}, {arm} …", flush=True)
    done = run(part, arm, checkout, args.packages, args.out)
    file.parent.mkdir(parents=True, exist_ok=True)
    outcomes = {name: dataclasses.astuple(outcome) for name, outcome in done.outcomes.items()}
    file.write_text(json.dumps({**which, "seconds": done.seconds, "outcomes": outcomes}, indent=1))
    return done


def moved(stock: Run, other: Run) -> dict[str, tuple[Outcome, Outcome]]:
    """Tests that end differently."""
    none = Outcome("not run")
    names = sorted({*stock.outcomes, *other.outcomes})
    pairs = {name: (stock.outcomes.get(name, none), other.outcomes.get(name, none)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0].verdict != pair[1].verdict}


def file_of(test: str) -> str:
    """The file of a test's name in a report: ``tests.a.test_b.TestC::test_d`` is in ``tests/a/test_b.py``."""
    words = test.partition("::")[0].split(".")
    return "/".join(word for word in words if not word[:1].isupper()) + ".py"


def settled(suite: Suite, arm: str, stock: Run, other: Run, checkout: Path, args: argparse.Namespace) -> dict[str, Any]:
    """What moved and still moves when its files run alone: test -> from, to, and why."""
    suspects = moved(stock, other)
    if suspects and suite.again:
        files = tuple(sorted({file_of(name) for name in suspects}))
        again = moved(*(kept(suite, name, checkout, args, files) for name in (STOCK, arm)))
        suspects = {name: pair for name, pair in again.items() if name in suspects}
    found = {}
    for name, (before, after) in suspects.items():
        why, message = reason(suite.name, arm, name, after.verdict), after.message or before.message
        found[name] = {"from": before.verdict, "to": after.verdict, "message": message, "why": why}
    return found


def rows(suite: Suite, checkout: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row an arm."""
    runs = {arm: kept(suite, arm, checkout, args) for arm in suite.arms}
    found = []
    for arm, done in runs.items():
        counted = Counter(outcome.verdict for outcome in done.outcomes.values())
        found.append(
            {
                "suite": suite.name, "tests of": f"{suite.checkout} {commit(checkout)}", "run against": against(suite),
                "plugin": arm,
                "run": counted.total() - counted["skipped"], "passed": counted["passed"],
                "failed": counted["failed"] + counted["error"], "skipped": counted["skipped"],
                "minutes": round(done.seconds / 60, 1), "processor": processor(), "date": time.strftime("%Y-%m-%d"),
                "moved": {} if arm == STOCK else settled(suite, arm, runs[STOCK], done, checkout, args),
            }
        )  # fmt: skip
    return found


def against(suite: Suite) -> str:
    """What a suite judges, and in which version."""
    own = distributions(name=suite.judged, path=own_folders(suite))
    return f"{suite.judged} {next((found.version for found in own), None) or installed_version(suite.judged)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in dict.fromkeys(suite.checkout for suite in SUITES):
        parser.add_argument(f"--{name}", type=Path, metavar="DIR", help=f"a checkout of {name}")
    parser.add_argument("--only", metavar="TEXT", default="", help="only suites whose name has this text")
    parser.add_argument("--packages", type=Path, default=Path(sys.prefix) / "judges", help="what make judges has installed")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "judges")
    parser.add_argument("--fresh", action="store_true", help="run again what was run")
    args = parser.parse_args()
    args.out = args.out.resolve()
    results = json.loads(RESULTS.read_text()) if RESULTS.is_file() else []
    vain = []
    for suite in SUITES:
        checkout = getattr(args, suite.checkout.replace("-", "_"))
        if checkout is None or args.only not in suite.name:
            continue
        found = rows(suite, checkout.resolve(), args)
        if any(row["passed"] for row in found):
            results = [row for row in results if row["suite"] != suite.name] + found
        else:
            vain.append(suite.name)
            for file in (args.out / "runs").glob(f"{suite.name} *.json"):
                file.unlink()
    order = [suite.name for suite in SUITES]
    results = sorted((row for row in results if row["suite"] in order), key=lambda row: order.index(row["suite"]))
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    PAGE.write_text(filled(PAGE.read_text(), texts(results)))
    print(texts(results)["judges"])
    open_ones = [(row, name, move) for row in results for name, move in row["moved"].items() if move["why"] is None]
    for row, name, move in open_ones:
        print(f"{row['suite']}, {row['plugin']}: {name}: {move['from']}, then {move['to']}: {move['message']}")
    for name in vain:
        print(f"{name}: no test passed, without the plugin or with it. The logs are in {args.out}; earlier results stay.")
    return 1 if open_ones or vain else 0


def texts(results: list[dict[str, Any]]) -> dict[str, str]:
    """The page's generated parts: the table, and why tests moved."""
    shown = ("suite", "tests of", "run against", "plugin", "run", "passed", "failed", "skipped", "minutes")
    table = [
        {**{name: row[name] for name in shown}, "moved": "–" if row["plugin"] == STOCK else len(row["moved"])} for row in results
    ]
    reasons: Counter[tuple[str, str, str]] = Counter()
    for row in results:
        reasons.update((row["suite"], row["plugin"], move["why"] or "not explained") for move in row["moved"].values())
    listed = [f"- {suite}, {arm}, {number} test{'s' * (number > 1)}: {why}" for (suite, arm, why), number in reasons.items()]
    where = "; ".join(sorted({f"{row['processor']}, {row['date']}" for row in results}))
    return {"judges": markdown(table) + f"\nRun on two cores: {where}.\n", "moved": "\n".join(listed) + "\n"}


if __name__ == "__main__":
    sys.exit(main())
