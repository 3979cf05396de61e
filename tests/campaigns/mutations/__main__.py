"""Apply each change by itself and run the tests nearest to it: ``make mutations``.

``python -m tests.campaigns.mutations TEXT`` applies only changes whose name has the text. The changes are made in copies of the
tree, several at a time. Verdicts are kept in build/mutations.json for as long as the file, the change and its tests stay as they
are. Exit status 1 if a change survives.
"""

from __future__ import annotations

import hashlib
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from scripts.tables import markdown
from tests.campaigns import kept
from tests.campaigns.kept import ROOT
from tests.campaigns.mutations.changes import Change, changes

NAME = "mutations"
#: copies of the tree, each with tests of its own
WORKERS = 2
#: seconds; a change that makes a test hang counts as found
LIMIT = 900
#: pytest's exit statuses
_PASSED, _FAILED = 0, 1


def main() -> int:
    from rich.progress import track

    part = sys.argv[1] if len(sys.argv) > 1 else ""
    chosen = [change for change in changes() if part in change.name]
    done = kept.read(NAME)
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder, ThreadPoolExecutor(WORKERS) as pool:
        trees: queue.Queue[Path] = queue.Queue()
        for number in range(WORKERS):
            trees.put(copied(Path(folder) / str(number)))
        unchanged = {tests: Change("unchanged", "", "", "", tests) for tests in dict.fromkeys(change.tests for change in chosen)}
        keys = {change: key(change) for change in (*unchanged.values(), *chosen)}
        todo = [change for change, name in keys.items() if name not in done]
        running = {pool.submit(judge, change, trees): change for change in todo}
        for future in track(as_completed(running), "changes", total=len(todo)):
            change = running[future]
            done[keys[change]] = future.result()
            kept.write(NAME, done)
    return told(chosen, list(unchanged.values()), {change: done[name] for change, name in keys.items()})


def told(chosen: Sequence[Change], unchanged: Sequence[Change], verdicts: Mapping[Change, str]) -> int:
    """Print the table and what is wrong. Returns the exit status."""
    broken = [change for change in unchanged if verdicts[change] != "passed"]
    for change in broken:
        print(f"without a change: {' '.join(change.tests)}: {verdicts[change]}")
    rows: dict[str, dict[str, Any]] = {}
    for change in chosen:
        row = rows.setdefault(change.file, {"file": change.file, "changes": 0, "found": 0})
        row["changes"] += 1
        row["found"] += found(verdicts[change])
        if not found(verdicts[change]):
            print(f"SURVIVES ({verdicts[change]}) {change.name}: {change.old!r} -> {change.new!r}")
    total = {"file": "all", **{name: sum(row[name] for row in rows.values()) for name in ("changes", "found")}}
    print(markdown([*rows.values(), total]))
    return 1 if broken or total["changes"] != total["found"] else 0


def found(verdict: str) -> bool:
    return verdict in ("failed", "hangs")


def judge(change: Change, trees: queue.Queue[Path]) -> str:
    """``passed``, ``failed``, ``hangs``, or pytest's other statuses as text, which say nothing about the change."""
    tree = trees.get()
    path = tree / change.file
    before = path.read_text() if change.file else ""
    try:
        if change.file:
            path.write_text(before.replace(change.old, change.new))
        options = ("-x", "-q", "-p", "no:cacheprovider", "-m", "not slow and not e2e")
        command = [sys.executable, "-m", "pytest", *options, *change.tests]
        # without bytecode: that of a file which is written twice in a second could be stale
        own = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPYCACHEPREFIX": str(tree / "none"), "PYTHONPATH": str(tree)}
        run = subprocess.run(command, cwd=tree, env={**os.environ, **own}, capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return "hangs"
    finally:
        if change.file:
            path.write_text(before)
        trees.put(tree)
    known = {_PASSED: "passed", _FAILED: "failed"}
    return known.get(run.returncode) or f"pytest's status {run.returncode}: {run.stdout.strip().splitlines()[-1:]}"


def copied(tree: Path) -> Path:
    """A copy of the working tree, in which ``jetrl_patch`` has its adapters: tests that run there import it."""
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name)
    (tree / "jetrl_patch" / "adapters").symlink_to("../adapters")
    return tree


def key(change: Change) -> str:
    """What the verdict depends on, except the rest of the package."""
    files = [name.partition("::")[0] for name in (change.file, *change.tests) if name]
    words = [change.old, change.new, *((ROOT / file).read_text() for file in files)]
    return f"{change.name} {hashlib.sha256(chr(0).join(words).encode()).hexdigest()[:16]}"


if __name__ == "__main__":
    begin = time.monotonic()
    status = main()
    print(f"{(time.monotonic() - begin) / 60:.1f} minutes")
    sys.exit(status)
