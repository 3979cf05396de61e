"""Judge the scripts of one or more checkouts and write ``docs/official-scripts.md``."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from scripts.official import keys, page
from scripts.official.expand import expand
from scripts.official.judge import Judged, judge, on_target

PAGE = page.ROOT / "docs" / "official-scripts.md"
RUNS = Path(__file__).with_name("runs.json")


def title(folder: Path) -> str:
    """The framework and version of a checkout: ``verl 0.9.1``; the folder's name if it says neither."""
    for name, path in (("verl", "verl/version/version"), ("OpenRLHF", "version.txt")):
        for place in (folder, folder.parent):
            if (place / path).is_file():
                return f"{name} {(place / path).read_text().strip()}"
    return folder.resolve().name


def source(folder: Path, place: Path) -> Iterator[page.Source]:
    """Expand and judge one checkout."""
    workplace = place / "work"
    expansions = expand(folder.resolve(), workplace)
    judged: list[Judged] = []
    with on_target():
        for expansion in expansions:
            judged += [judge(launch, place / "models", workplace) for launch in expansion.launches]
    yield title(folder), expansions, judged


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkouts", type=Path, nargs="+", help="checkouts of verl or OpenRLHF, or folders of scripts")
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--counts", type=Path, help="also write the counts as JSON, to compare a later state with")
    parser.add_argument("--keys", action="store_true", help="list the settings of accepted launches that nobody has looked at")
    args = parser.parse_args()
    for name in [name for name in os.environ if name.startswith("JETRL_")]:
        del os.environ[name]
    with tempfile.TemporaryDirectory(prefix="official-") as temporary:
        sources = [
            found
            for i, folder in enumerate(args.checkouts)
            for found in source(folder, Path(os.path.realpath(temporary)) / str(i))
        ]
    if args.counts:
        table = {name.split()[0]: page.counts(judged) for name, _, judged in sources}
        args.counts.write_text(json.dumps(table, indent=1) + "\n")
    for name, _, judged in sources:
        print(name)
        for kind, row in page.counts(judged).items():
            print(f"  {kind or 'unknown model'}: " + ", ".join(f"{key} {value}" for key, value in row.items()))
        if args.keys:
            for line in keys.unknown(judged):
                print(f"  {line}")
    runs = json.loads(RUNS.read_text()) if RUNS.exists() else []
    args.page.write_text(page.write(sources, runs))
    print(f"written: {args.page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
