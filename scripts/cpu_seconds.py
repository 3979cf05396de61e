"""Print what each test file costs in CPU-seconds, from the files that ``pytest --cpu-seconds`` has written.

    python -m scripts.cpu_seconds outputs/cpu-seconds-*.json

CPU-seconds depend on the processor, so the sum is also given as on a reference machine, where a Python loop counts to ten million
in half a second. The budget is for that sum. A suite beyond it is reported, not failed: no verdict depends on the machine.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

#: CPU-seconds of ``make test`` on the reference machine, which needs ``COUNT`` to count to ten million
BUDGET, COUNT = 4000, 0.5
#: files below this share of the whole are one line
SMALL = 0.005


def count() -> float:
    """CPU-seconds in which this machine counts to ten million, the fastest of three times."""
    found = []
    for _ in range(3):
        begin, number = time.process_time(), 0
        while number < 10_000_000:
            number += 1
        found.append(time.process_time() - begin)
    return min(found)


def table(used: Counter[str], speed: float) -> str:
    """The summary, most expensive files first. ``speed`` is what ``count`` returns."""
    total = used.total()
    large = [(name, seconds) for name, seconds in used.most_common() if seconds >= SMALL * total]
    rest = total - sum(seconds for _, seconds in large)
    lines = [*large, (f"{len(used) - len(large)} others", rest), ("all", total)]
    rows = [f"{seconds:9.1f} {seconds / total:6.1%}  {name}" for name, seconds in lines]
    reference = total * COUNT / speed
    verdict = "within" if reference <= BUDGET else "BEYOND"
    last = f"{reference:.0f} on the reference machine (it counts to ten million in {COUNT} s, this one in {speed:.2f} s)"
    last += f": {verdict} the budget of {BUDGET}"
    return "\n".join(["CPU-seconds of the tests, child processes included", *rows, last])


def main(paths: Sequence[str]) -> None:
    used: Counter[str] = Counter()
    for path in paths:
        used.update(json.loads(Path(path).read_text()))
    print(table(used, count()))


if __name__ == "__main__":
    main(sys.argv[1:])
