"""What a test file costs includes its child processes, and those that outlive their parents."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from scripts import cpu_seconds
from tests.cpu_seconds import Meter

#: uses half a second of CPU after its parent has ended, and then waits to be looked at
ORPHAN = "import os, time\nwhile os.getppid() == {0}: time.sleep(0.1)\nwhile time.process_time() < 0.5: pass\ntime.sleep(2)"
PARENT = """import os, subprocess, sys, time
subprocess.Popen([sys.executable, '-c', sys.argv[1].format(os.getpid())])
time.sleep(1.5)"""
ROOT = Path(__file__).resolve().parents[1]


def test_orphans_count() -> None:
    meter = Meter()
    before = meter.total()
    subprocess.run([sys.executable, "-c", PARENT, ORPHAN], check=True)
    end = time.monotonic() + 60
    while meter.total() - before < 0.4:
        assert time.monotonic() < end
        time.sleep(0.2)


def test_each_file_of_each_worker_is_written(tmp_path: Path) -> None:
    for name in ("test_a.py", "test_b.py"):
        (tmp_path / name).write_text("def test_it():\n    x = 0\n    for _ in range(3_000_000): x += 1\n")
    (tmp_path / "conftest.py").write_text(
        "from pathlib import Path\nfrom tests.cpu_seconds import CpuSeconds\n"
        f"def pytest_configure(config): config.pluginmanager.register(CpuSeconds(Path({str(tmp_path / 'out' / 'x.json')!r})))\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--numprocesses", "2", "--dist", "loadfile"]
    subprocess.run([*command, "--rootdir", str(tmp_path), str(tmp_path)], check=True, cwd=ROOT, capture_output=True)
    found = json.loads((tmp_path / "out" / "x.json").read_text())
    assert found.keys() == {"collection", "test_a.py", "test_b.py"} and all(found[f"test_{x}.py"] > 0.05 for x in "ab")


def test_the_summary_says_where_the_budget_is() -> None:
    used = Counter({"tests/test_a.py": 100.0, "tests/test_b.py": 0.1, "tests/test_c.py": 0.1})
    assert [line.split() for line in cpu_seconds.table(used, 1.0).splitlines()[1:4]] == [
        ["100.0", "99.8%", "tests/test_a.py"], ["0.2", "0.2%", "2", "others"], ["100.2", "100.0%", "all"],
    ]  # fmt: skip
    assert cpu_seconds.table(used, 1.0).splitlines()[-1].startswith("50 on the reference machine")
    assert ": within the budget" in cpu_seconds.table(used, 1.0)
    assert ": BEYOND the budget" in cpu_seconds.table(Counter({"tests/test_a.py": cpu_seconds.BUDGET + 1.0}), cpu_seconds.COUNT)
