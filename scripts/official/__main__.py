"""Judge the scripts of one or more checkouts and write ``docs/official-scripts.md``."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

from scripts.official import keys, models, page, run
from scripts.official.expand import expand
from scripts.official.judge import judge, modes, on_target

PAGE = page.ROOT / "docs" / "official-scripts.md"
RUNS = Path(__file__).with_name("runs.json")


def title(folder: Path) -> str:
    """The framework and version of a checkout, such as ``verl 0.9.1``, or the folder's name."""
    for name, path in (("verl", "verl/version/version"), ("OpenRLHF", "version.txt")):
        for place in (folder, folder.parent):
            if (place / path).is_file():
                return f"{name} {(place / path).read_text().strip()}"
    return folder.resolve().name


def source(folder: Path, place: Path) -> page.Source:
    """Expand and judge one checkout."""
    workplace = place / "work"
    expansions = expand(folder.resolve(), workplace)
    models.write_all(place / "models")
    with on_target():
        judged = [judge(one, place / "models", workplace) for expansion in expansions for one in expansion.launches]
    return title(folder), expansions, judged


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkouts", type=Path, nargs="+", help="checkouts of verl or OpenRLHF, or folders of scripts")
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument(
        "--run", metavar="TEXT", help="run accepted scripts for real: one of each class whose name has TEXT"
    )
    parser.add_argument(
        "--out", type=Path, default=page.ROOT / "outputs" / "official", help="where the logs of real runs go"
    )
    args = parser.parse_args()
    for name in [name for name in os.environ if name.startswith("JETRL_")]:
        del os.environ[name]
    with tempfile.TemporaryDirectory(prefix="official-") as temporary:
        place = Path(os.path.realpath(temporary))
        sources = [source(folder, place / str(i)) for i, folder in enumerate(args.checkouts)]
    for name, _, judged in sources:
        print(name)
        for kind, row in page.counts(judged).items():
            print(f"  {kind or 'unknown model'}: " + ", ".join(f"{key} {value}" for key, value in row.items()))
        for mode in modes():
            for key, (number, values) in keys.open_keys(judged, mode).items():
                print(f"  {mode}: unreviewed setting {key} of {number} accepted launches: {', '.join(values)[:120]}")
    chosen = [(name, *found) for name, _, judged in sources for found in run.choose(judged)]
    runs = json.loads(RUNS.read_text()) if RUNS.exists() else []
    runs = [row for row in runs if any((row["script"], row["mode"]) == (one.launch.script, mode) for _, one, mode in chosen)]
    if args.run is not None:
        for release, one, mode in chosen:
            if args.run in one.launch.script:
                print(f"running {one.launch.script} in {mode} mode", flush=True)
                row = {**run.run(one, mode, args.out.resolve()), "release": release}
                print(f"  {row}", flush=True)
                runs = [old for old in runs if (old["script"], old["mode"]) != (row["script"], row["mode"])] + [row]
        runs.sort(key=lambda row: (row["framework"] != "verl", row["script"], row["mode"]))
        RUNS.write_text(json.dumps(runs, indent=1) + "\n")
    args.page.write_text(page.write(sources, runs))
    print(f"written: {args.page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
