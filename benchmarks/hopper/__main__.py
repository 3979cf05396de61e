"""``make hopper``: measure everything that needs a Hopper GPU, part by part, and write ``docs/benchmarks/hopper/``.

Goes on where it was stopped. What a part has found is never measured again unless ``--again`` or ``--failed`` asks for it.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.hopper.plan import ESTIMATED, LIMIT, PARTS, Part, find, table
from benchmarks.hopper.record import Found, load

ROOT = Path(__file__).resolve().parents[2]
PAGES, SCRATCH, DRY = (ROOT / place for place in ("docs/benchmarks/hopper", "outputs/hopper", "outputs/hopper-dry"))
#: seconds in which the processes of a part may end by themselves after its limit
GRACE = 10.0


def main(argv: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else list(argv)
    args = _parser().parse_args(arguments)
    out = args.out or (DRY if args.dry else PAGES)
    scratch = args.scratch or (DRY if args.dry else SCRATCH)
    try:
        parts = find(args.part)
        states = {part.letter: load(out / f"{part.name}.json", part.name).state for part in PARTS}
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    show(parts, states)
    if args.plan:
        return 0
    if not args.dry and (status := _check(parts, scratch, args.without_deep_gemm)):
        return status
    for part in parts:
        file = out / f"{part.name}.json"
        if args.again or args.dry:
            file.unlink(missing_ok=True)
        elif args.failed:
            forget(file, part)
    command = f"python -m benchmarks.hopper {shlex.join(arguments)}".strip()
    results = [_run(part, out, scratch, command, args.dry, args.without_deep_gemm) for part in parts]
    from benchmarks.hopper import page

    page.write(out, parts)
    show(parts, {part.letter: load(out / f"{part.name}.json", part.name).state for part in parts})
    print(f"pages and records: {out}")
    return 0 if all(results) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hopper", description=__doc__)
    parser.add_argument("--plan", action="store_true", help="print what there is and what it needs, and exit")
    parser.add_argument("--part", action="append", default=[], metavar="LETTER", help="only this part; may be repeated")
    parser.add_argument("--dry", action="store_true", help="tiny sizes on a CPU; nothing it writes is a measurement")
    parser.add_argument("--again", action="store_true", help="measure the chosen parts anew")
    parser.add_argument("--failed", action="store_true", help="run the failed cells of the chosen parts again")
    parser.add_argument("--out", type=Path, help="folder of records and pages")
    parser.add_argument("--scratch", type=Path, help="folder for checkpoints and logs")
    parser.add_argument("--without-deep-gemm", action="store_true", help="measure without DeepGEMM, which needs nvcc")
    return parser


def show(parts: Sequence[Part], states: dict[str, str]) -> None:
    """Print the plan."""
    rows = table(parts, states)
    lines = [list(rows[0]), *(list(row.values()) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    for line in lines:
        print("  ".join(text.ljust(width) for text, width in zip(line, widths)).rstrip())
    print(ESTIMATED, flush=True)


def _check(parts: Sequence[Part], scratch: Path, without_deep_gemm: bool) -> int:
    """Look at the machine in a process of its own."""
    letters = "".join(part.letter for part in parts)
    command = [sys.executable, "-m", "benchmarks.hopper.needs", letters, "--scratch", str(scratch)]
    command += ["--without-deep-gemm"] * without_deep_gemm
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def forget(file: Path, part: Part) -> None:
    """Remove the failed cells from a record, so that they run again."""
    if file.exists():
        record = load(file, part.name)
        record.cells = {name: found for name, found in record.cells.items() if not found.error}
        record.save(file)


def _run(
    part: Part, out: Path, scratch: Path, command: str, dry: bool, without_deep_gemm: bool, limit: float = LIMIT
) -> bool:
    """Run a part in a process of its own until it ends or its time does. Returns whether it is complete without a failure."""
    from examples.common.processes import Group

    file, log = out / f"{part.name}.json", scratch / f"{part.name}.log"
    record = load(file, part.name)
    if record.complete:
        print(f"\npart {part.letter} ({part.name}): {record.state}, kept", flush=True)
        return not record.failed
    scratch.mkdir(parents=True, exist_ok=True)
    print(f"\npart {part.letter} ({part.name}), log {log}", flush=True)
    words = [sys.executable, "-u", "-m", "benchmarks.hopper.part", part.letter, "--out", str(out), "--scratch", str(scratch)]
    words += ["--command", command, *["--dry"] * dry, *["--without-deep-gemm"] * without_deep_gemm]
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if dry else {}
    group, end, shown = Group(words, {**os.environ, **hidden}, ROOT, log), time.monotonic() + limit, 0
    try:
        while (ended := group.leader.poll()) is None and time.monotonic() < end:
            shown = _follow(log, shown)
            time.sleep(0.2)
    finally:
        group.end(GRACE)
        _follow(log, shown)
    record = load(file, part.name)
    if record.running and ended is None:  # else the same cell would take all of the next command too
        record.cells[record.running] = Found(record.running, error=f"did not end within {limit:.0f} s", command=command)
        record.running = ""
        record.save(file)
    if ended not in (0, None) and not record.failed and not record.left:
        print(f"part {part.letter} ended with status {ended}; see {log}", file=sys.stderr)
    return record.complete and not record.failed


def _follow(log: Path, shown: int) -> int:
    """Print what the log has gained; returns how much of it has been printed."""
    with log.open("rb") as file:
        file.seek(shown)
        fresh = file.read()
    sys.stdout.write(fresh.decode(errors="replace"))
    sys.stdout.flush()
    return shown + len(fresh)


if __name__ == "__main__":
    sys.exit(main())
